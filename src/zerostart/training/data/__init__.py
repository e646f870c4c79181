"""Pictures and videos to train on, and the cache of what they are encoded to."""
