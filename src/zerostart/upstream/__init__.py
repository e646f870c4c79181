"""Contacts with private parts of other libraries, one folder for each library.

Nothing else reaches below a library's public surface. ``guard.py`` declares and checks the names that are
used, ``patches.py`` replaces them and puts them back. ``tests/upstream`` fails when a library changes them.
"""
