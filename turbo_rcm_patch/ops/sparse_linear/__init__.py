"""Sparse-linear attention (arXiv 2509.24006)."""
