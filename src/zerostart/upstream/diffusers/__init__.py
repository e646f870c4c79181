"""What is touched of diffusers."""
