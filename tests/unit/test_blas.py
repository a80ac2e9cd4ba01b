"""NumPy's BLAS beside oneDNN: one thread within a kernel, and its own number again afterwards."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tilewright.devices.cpu.numpy import _blas
from tilewright.devices.cpu.onednn import capi

needed = pytest.mark.skipif(_blas._switch() is None or capi.available() is not None, reason="NumPy has no OpenBLAS here, or oneDNN is not in use")


@pytest.fixture
def two():
    get, put = _blas._switch()
    before = get()
    put(2)
    yield get
    put(before)


@needed
def test_one_thread_within_and_as_before_after(two):
    assert _blas.alone(lambda: two())() == 1
    assert two() == 2

    @_blas.alone
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert two() == 2


@needed
def test_calls_that_overlap_restore_it_once(two):
    seen = []
    gate = threading.Barrier(4)

    @_blas.alone
    def work(i):
        gate.wait(10)
        np.ones((64, 64)) @ np.ones((64, 64))
        if i % 2:
            gate_out.wait(10)
        seen.append(two())

    gate_out = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [1] * 4
    assert two() == 2


def test_without_onednn_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(_blas.capi, "available", lambda: "switched off")
    monkeypatch.setattr(_blas, "_switch", lambda: pytest.fail("it looked for the library"))
    assert _blas.alone(lambda x: x + 1)(1) == 2
