"""Private parts of TRL."""
