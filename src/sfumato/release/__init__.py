"""What may be published: weights, their description, the guarantee and the model card."""
