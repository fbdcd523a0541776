"""The families of models, one per file: their classes, their pairs and their fused blocks.

Families never import each other.
"""
