"""Where the bytes of a checkpoint lie, and how they are had."""
