"""Load a checkpoint into a sharded model: request, preparation, transfer, hand-over, report."""
