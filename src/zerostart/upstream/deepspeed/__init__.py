"""Private parts of DeepSpeed."""
