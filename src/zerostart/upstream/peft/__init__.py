"""Private parts of PEFT."""
