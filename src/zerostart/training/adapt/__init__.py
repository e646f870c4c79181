"""What is trained of a model, and what is exported of it: LoRA, freezing, averages."""
