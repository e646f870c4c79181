"""Pictures and videos that a run draws with the model in training: what is drawn, how, and where it goes."""
