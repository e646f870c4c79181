"""DeepSpeed's ZeRO stage 3."""
