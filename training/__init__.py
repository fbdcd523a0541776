"""Training of the shipped tiny models: `python -m training` from a checkout."""
