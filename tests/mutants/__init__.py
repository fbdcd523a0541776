"""Mutants: the library with one thing broken, and whether a test notices.

`python -m tests.mutants --help`; docs/mutants.md has the score and explains the survivors.
"""
