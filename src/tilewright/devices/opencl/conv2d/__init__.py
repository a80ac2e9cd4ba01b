"""Convolution and its two gradients: a file for each way to do them."""
