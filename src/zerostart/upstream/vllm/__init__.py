"""Private parts of vLLM."""
