"""PyTorch FSDP2: ``fully_shard`` on meta, then local shards allocated and filled."""
