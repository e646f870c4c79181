"""Where DeepSpeed keeps what a training state is made of."""
