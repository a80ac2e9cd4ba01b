"""Lock files: what is pinned comes back, is easy to read, and damage is named."""

from __future__ import annotations

import json
import os
import re

import pytest

from tilewright.errors import ArgumentError, DataError
from tilewright.tune.lock import Choice, Lock

CONV = "conv2d(float32[1,3,8,8] channels_last) -> (float32[1,4,6,6] channels_last) precision=float32"
ADD = "add(float32[3], float32[3]) -> (float32[3]) precision=float32"


def filled(path):
    lock = Lock(path)
    lock.set(CONV, Choice("cpu.conv2d.onednn", (("algorithm", "winograd"), ("tile", (4, 4)), ("fast", True)), 3))
    lock.set(ADD, Choice("cpu.add.numpy"))
    lock.set(ADD, Choice("opencl.add.vector", (("width", 4),)), "opencl")
    return lock


def test_what_is_pinned_comes_back(tmp_path):
    lock = filled(tmp_path / "lock.json")
    lock.write()
    back = Lock.read(tmp_path / "lock.json")
    assert list(back.items()) == list(lock.items())
    assert len(back) == 3
    choice = back.get(CONV)
    assert choice == Choice("cpu.conv2d.onednn", (("algorithm", "winograd"), ("tile", (4, 4)), ("fast", True)), 3)
    assert repr(choice) == repr(lock.get(CONV))
    assert hash(choice) == hash(lock.get(CONV))
    assert back.get(ADD).kernel == "cpu.add.numpy"
    assert back.get(ADD, "opencl").kernel == "opencl.add.vector"
    assert back.get(CONV, "opencl") is None
    back.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "lock.json").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again.json", "lock.json"]


def test_it_can_be_read_by_people(tmp_path):
    filled(tmp_path / "lock.json").write()
    assert (
        (tmp_path / "lock.json").read_text()
        == f"""\
{{
  "format": "tilewright-lock",
  "version": 1,
  "choices": {{
    "cpu": {{
      "{ADD}": {{"kernel": "cpu.add.numpy", "config": {{}}, "version": 1}},
      "{CONV}": {{"kernel": "cpu.conv2d.onednn", "config": {{"algorithm": "winograd", "tile": [4, 4], "fast": true}}, "version": 3}}
    }},
    "opencl": {{
      "{ADD}": {{"kernel": "opencl.add.vector", "config": {{"width": 4}}, "version": 1}}
    }}
  }}
}}
"""
    )


def test_the_order_of_setting_does_not_show(tmp_path):
    filled(tmp_path / "a").write()
    other = Lock(tmp_path / "b")
    for device, problem, choice in reversed(list(Lock.read(tmp_path / "a").items())):
        other.set(problem, Choice("else"), device)
        other.set(problem, choice, device)
    other.write()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_empty_lock(tmp_path):
    Lock(tmp_path / "lock").write()
    assert len(Lock.read(tmp_path / "lock")) == 0


def test_texts_of_any_kind(tmp_path):
    lock = Lock(tmp_path / "lock")
    problem = 'x("quoted\\", ä, \n, \u2028, \U0001f600)'
    lock.set(problem, Choice('k"', (("s", 'ä"\n'),)))
    lock.write()
    assert Lock.read(lock.path).get(problem) == lock.get(problem)


def test_a_missing_problem_is_told(tmp_path):
    lock = filled(tmp_path / "lock.json")
    assert lock.get("relu(...)") is None
    message = lock.missing("relu(...)")
    for part in (str(tmp_path / "lock.json"), "relu(...) on cpu", f"--lock {lock.path}", "TILEWRIGHT_LOCK"):
        assert part in message


def test_a_config_that_would_not_come_back_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be stored"):
        Lock(tmp_path / "lock").set(CONV, Choice("k", (("a", object()),)))


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(DataError, match=r"absent: could not be read.*tilewright tune --lock"):
        Lock.read(tmp_path / "absent")
    with pytest.raises(DataError, match="could not be written"):
        Lock(tmp_path / "no" / "lock").write()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    filled(tmp_path / "lock").write()
    before = (tmp_path / "lock").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"lock: could not be written \(No space left on device\); the file is as it was"):
        Lock(tmp_path / "lock").write()
    assert (tmp_path / "lock").read_bytes() == before
    assert os.listdir(tmp_path) == ["lock"]


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ('"cpu.add.numpy", ', '"cpu.add.numpy" ', 6, "delimiter"),
        ("{", "", 2, ""),
        ('"version": 3', '"version": "3"', 7, 'version is "3" and must be int'),
        ('"version": 3', '"version": true', 7, "version is true and must be int"),
        (', "version": 3', "", 7, "a choice is an object with kernel, config, version"),
        ('"kernel": "cpu.conv2d.onednn"', '"kernel": null', 7, "kernel is null and must be str"),
        ('"tile": [4, 4]', '"tile": {"a": 1}', 7, "a config's value is an object"),
        ('"tile": [4, 4]', '"tile": NaN', 7, "cannot be stored"),
        ('{"algorithm": "winograd", "tile": [4, 4], "fast": true}', "[]", 7, "config is [] and must be an object"),
        ('"opencl.add.vector"', "0", 10, "kernel is 0 and must be str"),
        ('"opencl": {', '"opencl": [], "x": {', 9, "a kind of device must have an object of problems"),
        (CONV, ADD, 6, "given twice"),
        ("tilewright-lock", "else", None, "not a lock file"),
        ('"version": 1,\n', '"version": 2,\n', None, "it is of version 2, and this Tilewright reads 1"),
        ('"choices"', '"choice"', None, 'must hold "format", "version" and "choices"'),
    ],
)
def test_damage_is_named_with_its_line(tmp_path, old, new, line, message):
    path = tmp_path / "lock.json"
    filled(path).write()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    place = re.escape(str(path)) + (f", line {line}: " if line else ": ")
    with pytest.raises(DataError, match=place + ".*" + re.escape(message) + ".*tilewright tune --lock"):
        Lock.read(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file(tmp_path, share):
    path = tmp_path / "lock.json"
    filled(path).write()
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(DataError, match=re.escape(str(path)) + r", line \d+: "):
        Lock.read(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[]", b"null", b"\x00" * 50, b"[" * 100_000, json.dumps({"choices": []}).encode()])
def test_another_file(tmp_path, content):
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "lock")) + ".*tilewright tune --lock"):
        Lock.read(tmp_path / "lock")
