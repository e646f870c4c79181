"""vLLM's workers and engines as places to which weights are pushed."""
