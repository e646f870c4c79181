"""Writing checkpoints: files of safetensors, and the one step by which readers go by the new ones."""
