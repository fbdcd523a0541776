"""One family a file: which class, which pairs, how it runs fused.

Families never import each other.
"""
