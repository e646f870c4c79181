"""What is touched of accelerate."""
