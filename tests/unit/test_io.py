"""Weights files: whole or not at all, and any damage is noticed (faults 25 and 32)."""

from __future__ import annotations

import errno
import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import save as plain_save

import tilewright as tw
from tilewright import _files as module
from tilewright import models, nn
from tilewright.errors import CheckpointError
from tilewright.io import load_safetensors, load_weights, save_safetensors, save_weights


def net():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2))


def values(model):
    return {k: np.array(v.numpy(), order="C") for k, v in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_a_model_comes_back_with_its_notes(tmp_path):
    first, second = net(), net()
    save_weights(tmp_path / "w.safetensors", first, {"epoch": "3"})
    notes = load_weights(tmp_path / "w.safetensors", second)
    assert notes["epoch"] == "3"
    assert same(values(first), values(second))
    assert second[0].weight.layout == "channels_last"
    assert os.listdir(tmp_path) == ["w.safetensors"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4, 5)])
def test_every_dtype_in_logical_order(tmp_path, dtype, shape):
    rng = np.random.default_rng(0)
    t = tw.tensor(rng.integers(0, 2, shape), dtype, layout="channels_last" if len(shape) == 4 else "contiguous")
    save_safetensors(tmp_path / "t", {"t": t})
    arrays, _ = load_safetensors(tmp_path / "t")
    assert arrays["t"].dtype == t.dtype.np
    assert arrays["t"].shape == shape
    assert np.array_equal(arrays["t"], t.numpy())


def test_the_bytes_lie_in_logical_order(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    save_safetensors(tmp_path / "t", {"t": tw.tensor(x, layout="channels_last")})
    assert (tmp_path / "t").read_bytes().endswith(x.tobytes())


@pytest.mark.parametrize("cut", ["one byte", "half", "all"])
def test_a_truncated_file_is_named_and_the_model_stays(tmp_path, cut):
    model = models.lenet()
    path = tmp_path / "lenet.safetensors"
    save_weights(path, model)
    data = path.read_bytes()
    path.write_bytes(data[: {"one byte": len(data) - 1, "half": len(data) // 2, "all": 0}[cut]])
    other = models.lenet()
    before = values(other)
    with pytest.raises(CheckpointError, match=r"lenet.safetensors.*truncated"):
        load_weights(path, other)
    assert same(before, values(other))


@pytest.mark.parametrize("flip", [0xFF, 0x01, 0x20])
def test_any_altered_byte_is_noticed(tmp_path, flip):
    path = tmp_path / "w.safetensors"
    first = {"a": np.arange(5, dtype=np.float32), "b": np.array([[1, 2]], dtype=np.int64)}
    save_safetensors(path, first, {"note": "one"})
    data = path.read_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= flip
        path.write_bytes(bytes(changed))
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load_safetensors(path)


def test_altered_weights_leave_the_model(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, net())
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(bytes(data))
    other = net()
    before = values(other)
    with pytest.raises(CheckpointError, match=r"w\.safetensors.*checksum"):
        load_weights(path, other)
    assert same(before, values(other))


def test_a_file_without_our_checksum_loads(tmp_path):
    first, second = net(), net()
    (tmp_path / "foreign").write_bytes(plain_save(values(first), {"format": "pt"}))
    assert load_weights(tmp_path / "foreign", second) == {"format": "pt"}
    assert same(values(first), values(second))


def test_a_file_without_notes_loads(tmp_path):
    (tmp_path / "foreign").write_bytes(plain_save({"a": np.ones(2, np.float32)}))
    arrays, notes = load_safetensors(tmp_path / "foreign")
    assert notes == {}
    assert arrays["a"].tolist() == [1, 1]


def test_a_misfit_names_file_and_entry_and_changes_nothing(tmp_path):
    path = tmp_path / "w.safetensors"
    state = values(net())
    state["2.weight"] = np.zeros((2, 5), np.float32)
    save_safetensors(path, state)
    other = net()
    before = values(other)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: .*2\.weight: \(2, 5\) given, \(2, 4\) in the model; nothing was changed"):
        load_weights(path, other)
    assert same(before, values(other))


@pytest.mark.parametrize("data", [b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(60), bytes(8) + b"{}", b"\xff" * 40])
def test_another_format_is_refused(tmp_path, data):
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        load_weights(tmp_path / "w.pt", net())


def test_an_unknown_type_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "U32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="x is of type U32"):
        load_safetensors(tmp_path / "w")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent.*could not be read"):
        load_safetensors(tmp_path / "absent")


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "w.safetensors"
    first = net()
    save_weights(path, first)
    old = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":

        class Full:
            def __init__(self, name, mode):
                self.file = open(name, mode)  # noqa: SIM115

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            write = full

        monkeypatch.setattr(module, "open", Full, raising=False)
    else:
        monkeypatch.setattr(module.os, step, full)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: could not be written \(No space left on device\); the file is as it was before"):
        save_weights(path, net())
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["w.safetensors"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_really_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(path, net())
    old = path.read_bytes()
    monkeypatch.setattr(module, "open", lambda name, mode: open("/dev/full", "wb"), raising=False)  # noqa: SIM115
    with pytest.raises(CheckpointError, match="No space left"):
        save_weights(path, net())
    assert path.read_bytes() == old


def test_an_interrupted_write_leaves_no_trace(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(path, net())
    old = path.read_bytes()

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save_weights(path, net())
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written"):
        save_weights(tmp_path / "no" / "w", net())


def test_what_the_format_cannot_hold_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="w: was not written: there are arrays of object"):
        save_safetensors(tmp_path / "w", {"a": np.array([object()])})
    assert not os.listdir(tmp_path)


def test_the_mask_of_the_process_is_kept(tmp_path):
    before = os.umask(0o027)
    try:
        save_weights(tmp_path / "w", net())
    finally:
        os.umask(before)
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o640
