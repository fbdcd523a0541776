"""Triton kernels: jit functions and their launchers. Imported on first launch, never before."""
