"""Activation checkpointing on every engine."""
