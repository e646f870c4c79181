"""The tensors of a live model, whichever engine holds it and whoever has loaded it."""
