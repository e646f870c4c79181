"""The loop of a run: session, steps, checkpoints, evaluation, progress."""
