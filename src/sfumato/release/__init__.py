"""What may leave the house: weights, their description, the guarantee and the model card."""
