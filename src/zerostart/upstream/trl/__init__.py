"""What is touched of TRL."""
