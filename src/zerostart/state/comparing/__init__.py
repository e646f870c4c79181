"""Compare checkpoints and models by digests and differences."""
