"""Trains and runs convolutional networks on CPUs through oneDNN, and on OpenCL devices."""

__version__ = "0.1.0"
