"""Kernels in NumPy: what does every problem where oneDNN is absent, refuses, or is known to be wrong."""
