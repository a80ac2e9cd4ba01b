"""A device that allocates nothing and computes nothing: what is left is the host's own cost per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Spec, Stamp
from tilewright.errors import DeviceError


class NullBuffer:
    __slots__ = ("__weakref__", "nbytes")
    stamped = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def view(self, offset: int, nbytes: int) -> NullBuffer:
        return NullBuffer(nbytes)

    @property
    def stamp(self) -> Stamp:
        return Stamp()

    def touch(self) -> None:
        pass


def _nothing(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    pass


class NullKernel(Kernel):
    device = "null"
    id = "null.any"
    op = "any"

    def prepare(self, problem: Problem, config: Config, device: Device) -> Launch:
        return _nothing


class NullDevice(Device):
    kind = "null"
    _any = (NullKernel(),)

    def kernels(self, op: str) -> Sequence[Kernel]:
        return self._any

    def allocate(self, nbytes: int) -> NullBuffer:
        return NullBuffer(nbytes)

    def upload(self, array: np.ndarray, to: Spec) -> NullBuffer:
        return NullBuffer(to.nbytes)

    def write(self, buffer: NullBuffer, array: np.ndarray, of: Spec) -> None:
        pass

    def download(self, buffer: NullBuffer, of: Spec) -> np.ndarray:
        raise DeviceError("the null device computes nothing, so a tensor on it has no values; use device='cpu'")


def open_device(name: str, index: int) -> NullDevice:
    return NullDevice(name)
