"""Shared by all tests: where the devices come from, and float64 as the reference's type."""

from __future__ import annotations

import os
import tempfile

import pytest

# Before the library reads them: tests measure nothing unasked, and leave the user's store alone.
os.environ.setdefault("TILEWRIGHT_TUNE", "off")
os.environ["TILEWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="tilewright-tests-")

from tilewright import devices
from tilewright.devices.cpu.onednn import capi


def pytest_report_header() -> str:
    missing = capi.available()
    onednn = f"oneDNN {'.'.join(map(str, capi.load().version))}" if missing is None else f"without oneDNN: {missing}"
    return f"tilewright: devices cpu and null; {onednn}; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"


@pytest.fixture
def cpu():
    return devices.get("cpu")
