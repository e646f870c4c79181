"""The libraries of models that zerostart knows itself."""
