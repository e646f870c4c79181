"""The package's contacts with private parts of other libraries: one file for each, with its versions.

Nothing else reaches below a library's public surface. Each file checks what it uses when it is first
needed, and ``tests/upstream`` fails when upstream moves.
"""
