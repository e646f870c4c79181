"""How bytes of an image come from trainer ranks to workers; one file each."""
