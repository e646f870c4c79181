"""Families of diffusion models, their encoders, and flow matching."""
