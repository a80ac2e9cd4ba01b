"""Every error Tilewright raises on purpose. Each message names the op or file, the value, the rule and a remedy."""

from __future__ import annotations


class TilewrightError(Exception):
    """Base class: `except TilewrightError` catches whatever this library refuses."""


class ShapeError(TilewrightError, ValueError):
    """Shapes that do not fit together, or an op's geometry that has no output."""


class DTypeError(TilewrightError, TypeError):
    """A dtype an op does not take, or dtypes that do not promote."""


class ArgumentError(TilewrightError, ValueError):
    """An option outside its range, or an unknown name."""


class DeviceError(TilewrightError, RuntimeError):
    """A device that is absent, does not hold the tensor, or failed."""


class OutOfMemory(DeviceError, MemoryError):
    """The device could not provide the bytes asked for."""


class KernelError(TilewrightError, RuntimeError):
    """No kernel takes the problem, or the one chosen failed."""


class AutogradError(TilewrightError, RuntimeError):
    """A gradient that cannot be had: no graph, a freed graph, a non-scalar start."""


class DataError(TilewrightError, ValueError):
    """A data file or folder that is missing, damaged or not what it claims."""


class CheckpointError(TilewrightError, ValueError):
    """A weights or checkpoint file that is missing, damaged or does not fit the model."""
