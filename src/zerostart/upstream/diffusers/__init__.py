"""Private parts of diffusers."""
