"""The load of a model: what is asked for, what is found, what is filled, and what is told of it."""
