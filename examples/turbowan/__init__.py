"""Shared by `turbowan_t2v.py` and `turbowan_i2v.py`: TurboDiffusion's arguments and noise on
diffusers' pipelines.
"""
