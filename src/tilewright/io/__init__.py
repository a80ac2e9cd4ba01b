"""Files of weights."""

from tilewright.io.safetensors import check_place, load_safetensors, load_weights, save_safetensors, save_weights

__all__ = ["check_place", "load_safetensors", "load_weights", "save_safetensors", "save_weights"]
