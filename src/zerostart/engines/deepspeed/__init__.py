"""DeepSpeed ZeRO stage 3: partitions allocated at partition size, accepted by ``deepspeed.initialize``."""
