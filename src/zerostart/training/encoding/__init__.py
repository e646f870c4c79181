"""What the encoders of diffusers' pipelines make of an example: one module a family."""
