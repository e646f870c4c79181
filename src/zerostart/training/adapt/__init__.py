"""LoRA, freezing, averages, and the export of trained models."""
