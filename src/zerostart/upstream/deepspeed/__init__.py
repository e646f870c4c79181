"""What is touched of DeepSpeed: ZeRO-3, ZeRO-1 and 2, its state, its parallel axes."""
