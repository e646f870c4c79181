"""Private parts of DiffSynth-Studio."""
