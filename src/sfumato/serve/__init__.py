"""A page on this machine to try a released model on an image."""
