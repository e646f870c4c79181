"""Pictures and videos to train on, and the cache of their encodings."""
