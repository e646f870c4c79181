"""What is touched of torch."""
