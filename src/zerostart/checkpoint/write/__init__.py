"""Write safetensors checkpoints, and publish them by one rename."""
