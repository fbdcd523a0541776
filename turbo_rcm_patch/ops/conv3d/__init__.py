"""Convolutions of video autoencoders on channels-last activations, and the passes between them."""
