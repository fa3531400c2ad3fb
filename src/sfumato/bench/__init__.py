"""Speed: the gradient engine and the closed-form head against what they replace."""
