"""What is done with a model that is loaded: whole tensors, and edits."""
