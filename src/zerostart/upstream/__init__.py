"""The package's contacts with private parts of other libraries, a folder for each, and their registry.

Nothing else reaches below a library's public surface. What a file touches it declares in ``TOUCHED``
(``registry.py``): the versions that are known (``versions.py``), what the library's code has to look like
(``shapes.py``), what follows where it does not, and how long it lasts. What is replaced is put in place and
put back by ``patches.py``. ``tests/upstream`` fails when upstream moves.
"""
