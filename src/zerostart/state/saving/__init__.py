"""Models to files: what is written of a live model, where it goes, and the switch that publishes it."""
