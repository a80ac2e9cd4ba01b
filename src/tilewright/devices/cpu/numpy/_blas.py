"""NumPy's BLAS kept to one thread where oneDNN's threads are there too.

Both pools wait for their next work by spinning. With two of them on the same cores, each launch waits for threads that the
other pool's keep from running: measured on two cores, a convolution of 25 us took 5 ms beside one OpenBLAS product.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.devices.cpu.onednn import capi

_lock = threading.Lock()
_inside = 0  # calls that are running with one thread
_before = 0


@functools.cache
def _switch() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """OpenBLAS's functions that read and set its number of threads, from the library that NumPy has loaded."""
    near = os.path.dirname(np.__file__)
    paths = glob.glob(os.path.join(near, "..", "numpy.libs", "*openblas*")) + glob.glob(os.path.join(near, ".dylibs", "*openblas*"))
    try:
        with open("/proc/self/maps") as f:
            paths += [line.split(maxsplit=5)[5].strip() for line in f if "openblas" in line]
    except OSError:
        pass  # not Linux
    for path in dict.fromkeys(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", "", "_64"):
                get, put = (getattr(library, f"{prefix}_{verb}_num_threads{suffix}", None) for verb in ("get", "set"))
                if get is not None and put is not None:
                    return get, put
    return None  # another BLAS, or threads built in: left as it is


def alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: BLAS runs on one thread within `fn`, where oneDNN is in use."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        global _inside, _before
        switch = _switch() if capi.available() is None else None
        if switch is None:
            return fn(*args)
        get, put = switch
        with _lock:
            if not _inside:
                _before = get()
                if _before > 1:
                    put(1)
            _inside += 1
        try:
            return fn(*args)
        finally:
            with _lock:
                _inside -= 1
                if not _inside and _before > 1:
                    put(_before)

    return run
