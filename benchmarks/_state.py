"""Seeded weights and inputs that both sides of a comparison load, so that their results can be compared."""

from __future__ import annotations

import zlib

import numpy as np

INPUT = {"resnet18": (3, 224, 224), "mobilenet_v2": (3, 224, 224), "nature_cnn": (4, 84, 84)}


def seeded_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """One array per name: He-normal weights, small biases, and running statistics near (0, 1).

    Each array depends only on its name and shape, so the order in which a library lists them does not matter.
    """
    state = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("num_batches_tracked"):
            state[name] = np.zeros(shape, np.int64)
        elif name.endswith("running_var"):
            state[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        elif len(shape) >= 2:
            fan_in = int(np.prod(shape[1:]))
            state[name] = (rng.standard_normal(shape) * (2.0 / fan_in) ** 0.5).astype(np.float32)
        elif name.endswith("weight"):
            state[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        else:
            state[name] = (0.1 * rng.standard_normal(shape)).astype(np.float32)
    return state


def batch(model: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded normal images (size, C, H, W) float32 and labels (size,) int64 below the classes."""
    rng = np.random.default_rng(7)
    images = rng.standard_normal((size, *INPUT[model])).astype(np.float32)
    return images, rng.integers(0, 6 if model == "nature_cnn" else 1000, size)
