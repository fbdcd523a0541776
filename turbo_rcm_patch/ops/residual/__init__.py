"""Skips and norms of the residual stream."""
