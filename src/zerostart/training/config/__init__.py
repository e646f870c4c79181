"""The configuration of `zerostart train` and `cache`: keys, parsing, templates."""
