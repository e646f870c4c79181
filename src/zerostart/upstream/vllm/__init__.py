"""What is touched of vLLM."""
