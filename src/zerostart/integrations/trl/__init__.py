"""TRL's trainers: the weights that they generate with."""
