"""A differential fuzz: random operations against fp64, random models against themselves unpatched.

`python -m tests.fuzz --help`; see CONTRIBUTING.md.
"""
