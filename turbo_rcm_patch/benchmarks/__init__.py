"""Measurements, run with `python -m turbo_rcm_patch.benchmarks`."""
