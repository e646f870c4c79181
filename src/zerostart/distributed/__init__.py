"""The ranks of a job, and their agreement."""
