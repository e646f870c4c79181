"""PEFT's adapters of models in shards."""
