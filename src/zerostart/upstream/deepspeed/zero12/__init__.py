"""DeepSpeed's ZeRO stages 1 and 2."""
