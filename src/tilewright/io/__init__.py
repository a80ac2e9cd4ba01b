"""Files of weights."""

from tilewright.io.safetensors import load_safetensors, load_weights, save_safetensors, save_weights

__all__ = ["load_safetensors", "load_weights", "save_safetensors", "save_weights"]
