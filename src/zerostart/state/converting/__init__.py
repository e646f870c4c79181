"""Convert checkpoints between formats in bounded memory."""
