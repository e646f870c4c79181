"""DeepSpeed's experts, tensors and sequences over several ranks."""
