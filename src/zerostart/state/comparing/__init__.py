"""Whether two places hold the same tensors: digests and differences."""
