"""Scripts of DiffSynth-Studio."""
