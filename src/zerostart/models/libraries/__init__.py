"""Model libraries that zerostart supports."""
