"""What is touched of DiffSynth-Studio."""
