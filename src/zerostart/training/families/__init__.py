"""Families of diffusion transformers: how each is called, and in what its flow is told."""
