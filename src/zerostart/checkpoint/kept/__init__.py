"""Models that are kept in memory: their folders, the process that guards one, and who reads them."""
