"""What is touched of PEFT."""
