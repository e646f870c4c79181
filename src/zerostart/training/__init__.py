"""The runner: from a configuration to a trained model in a directory; tasks, data and export."""
