"""Pictures and videos to train on: tables of them, decoding, sizes; what the encoders of a task are given."""
