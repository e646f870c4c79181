"""Private parts of accelerate."""
