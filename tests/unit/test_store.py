"""The store of measurements: what goes in comes out, whatever happens to the file."""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright import devices
from tilewright.devices import api
from tilewright.devices.api import CHANNELS_LAST, Kernel, Problem, spec
from tilewright.dtypes import float32
from tilewright.errors import ArgumentError, DataError
from tilewright.ops._op import OPS
from tilewright.ops.conv2d import Conv2dAttrs
from tilewright.tune import store as module
from tilewright.tune.store import Key, Store, Trial, cache_folder, config_text, parse_config, problem_text, source_hash

KEY = Key("conv2d(...)", "cpu", "x86-64 avx2", "onednn 3.2", "float32", 2, False)
CURRENT = {"a": (1, "aa"), "b": (1, "bb"), "c": (2, "cc")}


def trial(kernel="a", median=1e-3, status="ok", config=(), when=1.5, **kw):
    version, source = CURRENT.get(kernel, (1, "xx"))
    given = {"version": version, "source": source, "spread_s": 1e-6, "count": 9, **kw}
    return Trial(kernel, config, status=status, median_s=median, when=when, **given)


def keys(n):
    return [replace(KEY, problem=f"conv2d(float32[{i},3,224,224])") for i in range(n)]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "tuning.sqlite3")


@pytest.fixture
def store(path):
    s = Store(path)
    yield s
    s.close()


def filled(path, n=60, rows=3):
    """A closed store of n problems; what it holds."""
    s = Store(path)
    held = {}
    for i, key in enumerate(keys(n)):
        held[key] = [trial("abc"[j], 1e-3 * (i + j + 1), config=(("tile", j),), reason="r" * 50) for j in range(rows)]
        assert s.record(key, held[key])
    s.close()
    return held


def heard(caught, *parts):
    """Exactly one warning, naming all the parts."""
    messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(messages) == 1, messages
    assert len(caught) == 1
    for part in parts:
        assert part in messages[0]


def use(s, key=KEY):
    """Everything that can be asked of a store, with nothing raised; whether a write was kept."""
    s.ranking(key, CURRENT)
    s.trials(key)
    kept = s.record(key, [trial()])
    s.items()
    s.status({"cpu": ("x", "y")}, CURRENT)
    s.delete(replace(KEY, problem="absent"))
    s.prune({"gpu": ("x", "y")}, CURRENT)
    return kept


# -- texts -------------------------------------------------------------------------------------------------------------


def test_a_problem_has_one_text_and_no_other_has_it():
    seen = {}
    for op in OPS.values():
        for sample in op.samples():
            specs = tuple(None if a is None else a.spec for a in sample.inputs)
            problem = Problem(op.name, sample.attrs, specs, op.outputs(sample.attrs, *specs))
            text = problem_text(problem)
            assert text.isascii()
            assert "\n" not in text
            assert seen.setdefault(text, problem) == problem or "nan" in text
    assert len(seen) > 1000


def test_the_text_tells_all():
    x, w = spec((1, 3, 8, 8), "float32", CHANNELS_LAST), spec((4, 3, 3, 3), "float32", CHANNELS_LAST)
    y = spec((1, 4, 6, 6), "float32", CHANNELS_LAST)
    problem = Problem("conv2d", Conv2dAttrs(activation="relu"), (x, w, None, None), (y,))
    assert problem_text(problem) == (
        "conv2d(float32[1,3,8,8] channels_last, float32[4,3,3,3] channels_last, -, -) -> (float32[1,4,6,6] channels_last) "
        "Conv2dAttrs(stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1, activation='relu', alpha=0.0, beta=0.0) precision=float32"
    )
    rivals = [
        replace(problem, precision="bfloat16"),
        replace(problem, inputs=(spec((1, 3, 8, 8), "float32"), w, None, None)),
        replace(problem, inputs=(x, w, spec((4,), "float32"), None)),
        replace(problem, outputs=(spec((1, 4, 6, 6), "float32"),)),
        replace(problem, op="conv2d_weight_grad"),
        *[replace(problem, attrs=a) for a in (None, (), 1, 1.0, True, "1", (1,), ((1,),), (1, 2), float32, "float32", "a, b", ("a", "b"))],
    ]
    assert len({problem_text(p) for p in [problem, *rivals]}) == len(rivals) + 1


def test_an_attribute_without_a_text_is_refused():
    with pytest.raises(ArgumentError, match="pad: an attribute of type object cannot key a measurement"):
        problem_text(Problem("pad", (1, object()), (), ()))


@pytest.mark.parametrize(
    "config",
    [
        (),
        (("tile", 64), ("vector", 4)),
        (("vector", 4), ("tile", 64)),
        (("x", True), ("y", 1), ("z", 1.0), ("f", 0.1), ("n", None)),
        (("s", "täx\n\"'"), ("t", (1, (2, "b"), ()))),
    ],
)
def test_a_config_comes_back_the_same(config):
    back = parse_config(config_text(config))
    assert back == config
    assert repr(back) == repr(config)  # True is not 1, nor 1.0
    assert hash(back) == hash(config)


@pytest.mark.parametrize(
    "config", [(("a", [1]),), (("a", object()),), (("a", 1), ("a", 2)), ((1, 2),), (("a", float("nan")),), (("a", {1: 2}),), "ab"]
)
def test_a_config_that_would_not_come_back_is_refused(config):
    with pytest.raises(ArgumentError, match="cannot be stored"):
        config_text(config)


def test_the_hash_follows_the_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "from tilewright.devices.api import Kernel\nclass Mine(Kernel):\n    id, op, device = 'x', 'y', 'z'\n    def prepare(self, *a): pass\n"
    hashes = []
    for more in ("", "# changed\n"):
        (tmp_path / "planted_kernel.py").write_text(code + more)
        sys.modules.pop("planted_kernel", None)
        module._module_digest.cache_clear()
        hashes.append(source_hash(__import__("planted_kernel").Mine()))
    (tmp_path / "planted_kernel.cl").write_text("kernel void f() {}")
    module._module_digest.cache_clear()
    hashes.append(source_hash(sys.modules["planted_kernel"].Mine()))
    sys.modules.pop("planted_kernel", None)
    assert len(set(hashes)) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", h) for h in hashes)


@pytest.mark.parametrize("helper", ["_gemm", "_source", "_expr", "conv2d.direct"])
def test_the_hash_follows_what_a_kernel_uses(helper, monkeypatch):
    """An edit of the tiled product that pointwise convolutions share makes their old trials count no more."""
    pointwise = importlib.import_module("tilewright.devices.opencl.conv2d.gemm")
    kernel = next(k for k in api.registered("opencl") if type(k).__module__ == pointwise.__name__)
    monkeypatch.setattr(module, "source_hash", functools.cache(module.source_hash.__wrapped__))
    before = module.source_hash(kernel)
    digest = module._module_digest
    monkeypatch.setattr(module, "_module_digest", lambda name: b"edited" if name == f"tilewright.devices.opencl.{helper}" else digest(name))
    module.source_hash.cache_clear()
    assert module.source_hash(kernel) != before


def test_a_function_counts_with_its_kernel():
    devices.get("cpu")
    ks = [k for k in api.registered("cpu") if ".numpy" in k.id]
    by_file = {k.fn.__module__: source_hash(k) for k in ks if hasattr(k, "fn")}  # type: ignore[attr-defined]
    assert len(by_file) > 5
    assert len(set(by_file.values())) == len(by_file)
    assert all(isinstance(k, Kernel) and source_hash(k) == source_hash(k) for k in api.registered("cpu"))


@pytest.mark.parametrize(
    "wrong",
    [{"status": "good"}, {"median_s": None}, {"median_s": float("nan")}, {"median_s": -1.0}, {"median_s": float("inf")}, {"spread_s": float("nan")}],
)
def test_a_trial_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ArgumentError, match="trial"):
        Trial(**{"kernel": "a", "config": (), "version": 1, "source": "s", "status": "ok", "median_s": 1.0, **wrong})


def test_the_folder_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    s = Store()
    assert s.path == str(tmp_path / "here" / "tuning.sqlite3")
    assert s.record(KEY, [trial()])
    s.close()
    monkeypatch.setenv("TILEWRIGHT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "tilewright" in str(cache_folder())
    assert not (tmp_path / "xdg").exists()


# -- rows --------------------------------------------------------------------------------------------------------------


def test_what_goes_in_comes_out(store, path):
    rows = [
        trial("a", 0.1 + 0.2, config=(("tile", (8, 4)), ("fast", True))),
        trial("a", None, "wrong", config=(("tile", (4, 4)),), reason="0.5 where 0.25 was due, at (1, 2, 3) – äöü \udc80 end", spread_s=None),
        trial("b", None, "timeout", count=0),
        trial("c", 1e-9, "over-limit"),
    ]
    assert store.record(KEY, rows)
    for s in (store, Store(path)):
        back = {(t.kernel, t.config): t for t in s.trials(KEY)}
        assert len(back) == 4
        for t in rows:
            got = back[t.kernel, t.config]
            assert got == replace(t, reason=got.reason)
            assert repr(got.config) == repr(t.config)
            assert got.reason == t.reason.encode("utf-8", "backslashreplace").decode()
        s.close()


@pytest.mark.parametrize(
    "other", [{"problem": "x"}, {"device": "x"}, {"driver": "x"}, {"library": "x"}, {"precision": "x"}, {"threads": 1}, {"deterministic": True}]
)
def test_a_key_shares_nothing(store, other):
    store.record(KEY, [trial()])
    assert store.trials(replace(KEY, **other)) == []
    store.record(replace(KEY, **other), [trial("b")])
    assert [t.kernel for t in store.trials(KEY)] == ["a"]


def test_a_candidate_has_one_row(store):
    store.record(KEY, [trial("a", 1.0, when=5.0), trial("b", 2.0)])
    store.record(KEY, [trial("a", 3.0, when=4.0, version=2)])  # even where the clock went back
    assert [(t.kernel, t.median_s, t.version) for t in store.trials(KEY)] == [("a", 3.0, 2), ("b", 2.0, 1)]


def test_the_fastest_first_and_only_what_is_valid(store):
    store.record(KEY, [trial("a", 3.0), trial("b", 1.0), trial("c", 2.0), trial("a", 0.1, "wrong", config=(("t", 1),)), trial("gone", 0.01)])
    assert [t.kernel for t in store.ranking(KEY, CURRENT)] == ["b", "c", "a"]
    assert [t.kernel for t in store.ranking(KEY, {**CURRENT, "b": (2, "bb")})] == ["c", "a"]
    assert [t.kernel for t in store.ranking(KEY, {**CURRENT, "b": (1, "b2")})] == ["c", "a"]
    assert store.ranking(KEY, {}) == []


def test_what_is_read_ahead_is_what_is_there(store):
    other = replace(KEY, problem="another")
    store.record(KEY, [trial("a", 2.0), trial("b", 1.0), trial("c", None, "wrong")])
    assert store.ranking(other, CURRENT, ahead=True) == []
    assert store.ranking(KEY, CURRENT, ahead=True) == store.ranking(KEY, CURRENT)
    beside = Store(store.path)
    beside.record(other, [trial("a", 3.0)])
    beside.close()
    assert [t.median_s for t in store.ranking(other, CURRENT, ahead=True)] == [3.0]
    store.record(KEY, [trial("a", 0.5)])
    assert [t.kernel for t in store.ranking(KEY, CURRENT, ahead=True)] == ["a", "b"]


def test_deleting(store):
    store.record(KEY, [trial("a"), trial("a", config=(("t", 1),)), trial("b")])
    other = replace(KEY, threads=1)
    store.record(other, [trial("a")])
    assert store.delete(KEY, "a", (("t", 1),)) == 1
    assert [(t.kernel, t.config) for t in store.trials(KEY)] == [("a", ()), ("b", ())]
    assert store.delete(KEY, "a") == 1
    assert store.delete(KEY) == 1
    assert store.delete(KEY) == 0
    assert store.status()["problems"] == 1
    assert len(store.trials(other)) == 1


def test_pruning_and_counting(store, path):
    now = {"cpu": ("x86-64 avx2", "onednn 3.2")}
    store.record(KEY, [trial("a"), trial("b", None, "failed"), trial("c", version=1), trial("gone")])
    store.record(replace(KEY, driver="x86-64 sse"), [trial("a"), trial("b")])
    store.record(replace(KEY, library="onednn 2.0"), [trial("a")])
    store.record(replace(KEY, device="gpu", driver="old"), [trial("a")])
    status = store.status(now, CURRENT)
    assert status["path"] == path
    assert status["bytes"] >= os.path.getsize(path) > 0
    assert status["problems"] == 4
    assert status["trials"] == {"ok": 7, "wrong": 0, "failed": 1, "timeout": 0, "over-limit": 0}
    assert status["stale"] == {"driver": 2, "library": 1, "kernel": 2}
    assert store.status()["stale"] == {"driver": 0, "library": 0, "kernel": 0}
    assert store.prune(now) == 3
    assert store.prune(now, CURRENT) == 2
    assert store.prune(now, CURRENT) == 0
    assert [(k.device, t.kernel) for k, t in store.items()] == [("cpu", "a"), ("cpu", "b"), ("gpu", "a")]
    assert store.status()["problems"] == 2


def test_reading_makes_no_file(tmp_path):
    s = Store(tmp_path / "no" / "store")
    assert s.trials(KEY) == s.ranking(KEY, CURRENT) == s.items() == []
    assert s.delete(KEY) == s.prune({}) == 0
    assert s.status() == {
        "path": s.path, "bytes": 0, "problems": 0, "trials": dict.fromkeys(module.STATUSES, 0), "stale": {"driver": 0, "library": 0, "kernel": 0}
    }  # fmt: skip
    assert os.listdir(tmp_path) == []


def test_a_closed_store_opens_again(store):
    store.record(KEY, [trial()])
    store.close()
    store.close()
    assert store.trials(KEY) == [trial()]


# -- export and import -------------------------------------------------------------------------------------------------


def test_exported_and_imported(path, tmp_path):
    held = filled(path, 5)
    s, file = Store(path), tmp_path / "trials.jsonl"
    s.record(KEY, [trial("a", None, "wrong", config=(("t", (1, 2.0)),), reason="ä\n")])
    assert s.export(file) == 16
    other = Store(tmp_path / "other")
    assert other.import_(file) == 16
    assert other.items() == s.items()
    assert other.trials(keys(1)[0]) == held[keys(1)[0]]
    lines = file.read_text().splitlines()
    assert json.loads(lines[0]) == {"format": "tilewright-trials", "version": 1, "count": 16}
    assert json.loads(lines[1])["config"] == {"t": [1, 2.0]}
    other.export(tmp_path / "again")
    assert (tmp_path / "again").read_text() == file.read_text()
    s.close()
    other.close()


def test_an_import_never_replaces_what_is_newer(store, tmp_path):
    store.record(KEY, [trial("a", 1.0, when=10.0), trial("b", 1.0, when=10.0)])
    store.export(tmp_path / "f")
    store.record(KEY, [trial("a", 2.0, when=20.0), trial("b", 2.0, when=5.0)])
    assert store.import_(tmp_path / "f") == 1
    assert [(t.kernel, t.median_s) for t in store.trials(KEY)] == [("a", 2.0), ("b", 1.0)]


@pytest.mark.parametrize(
    "spoil, line, message",
    [
        (lambda ls: [], 1, ""),
        (lambda ls: ['{"format": "else"}', *ls[1:]], 1, "a file of trials begins with"),
        (lambda ls: ["[]", *ls[1:]], 1, "a file of trials begins with"),
        (lambda ls: [*ls[:2], ls[2][:40]], 3, ""),
        (lambda ls: ls[:-1], 3, "the file ends after 2 trials and its first line promises 3"),
        (lambda ls: [*ls[:2], ls[2].replace('"ok"', '"fine"'), ls[3]], 3, "status 'fine' is not one of ok, wrong"),
        (lambda ls: [*ls[:3], ls[3].replace('"threads": 2', '"threads": "2"')], 4, 'threads is "2" and must be int'),
        (lambda ls: [*ls[:3], ls[3].replace('"threads": 2', '"threads": true')], 4, "threads is true and must be int"),
        (lambda ls: [*ls[:3], ls[3].replace('"median_s": 0.001', '"median_s": NaN')], 4, "must be finite"),
        (lambda ls: [*ls[:3], ls[3].replace('"config": {}', '"config": []')], 4, "config is [] and must be dict"),
        (lambda ls: [*ls[:3], ls[3].replace('"config": {}', '"config": {"a": {}}')], 4, "a config's value is an object"),
        (lambda ls: [*ls[:3], ls[3].replace('"kernel"', '"colonel"')], 4, "a trial is an object with problem, device"),
        (lambda ls: [*ls[:3], "\x00\x01"], 4, ""),
        (lambda ls: [*ls[:3], "[" * 100000], 4, ""),
    ],
)
def test_a_damaged_import_names_the_line_and_changes_nothing(path, tmp_path, spoil, line, message):
    source, s, file = Store(tmp_path / "source"), Store(path), tmp_path / "f.jsonl"
    source.record(KEY, [trial("a"), trial("b"), trial("c")])
    source.export(file)
    source.close()
    s.record(KEY, [trial("a", 7.0, when=0.0)])
    before = s.items()
    file.write_text("".join(text + "\n" for text in spoil(file.read_text().splitlines())))
    with pytest.raises(DataError, match=re.escape(f"{file}, line {line}: ") + ".*" + re.escape(message) + ".*nothing was imported"):
        s.import_(file)
    assert s.items() == before
    s.close()


def test_files_that_are_not_there(store, tmp_path):
    with pytest.raises(DataError, match="absent: could not be read"):
        store.import_(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="binary, line 1"):
        store.import_(tmp_path / "binary")
    with pytest.raises(DataError, match="could not be written"):
        store.export(tmp_path / "no" / "file")


# -- many at once ------------------------------------------------------------------------------------------------------

# One light process imports the store and forks the workers, so that fifty of them start in no time.
KILLING = """
import os, random, select, signal, sys, time
from tilewright.tune.store import Key, Store, Trial

path, kills = sys.argv[1], int(sys.argv[2])
rng = random.Random(5)

def work(name, log):
    store, i = Store(path), 0
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        key = Key(f"conv2d({name},{i})", "cpu", "d", "l", "float32", 1, False)
        trials = [Trial(f"k{j}", (("tile", j),), 1, "s", "ok", (i + j + 1) * 1e-6, 0.0, 3, "x" * 200, float(i)) for j in range(6)]
        if store.record(key, trials):
            os.write(fd, f"{name} {i}\\n".encode())
        if i % 7 == 0:
            assert len(store.ranking(key, {f"k{j}": (1, "s") for j in range(6)})) == 6
        i += 1

def start(name):
    pid = os.fork()
    if pid == 0:
        try:
            work(name, f"{path}.log.{name}")
        finally:
            os._exit(3)
    return pid

parent = Store(path)  # open while its children start
assert parent.record(Key("parent", "cpu", "d", "l", "float32", 1, False), [Trial("k0", (), 1, "s", "ok", 1.0)])
workers = {n: start(n) for n in range(8)}
for n in range(kills):
    time.sleep(rng.random() * 0.1)
    victim = rng.choice(list(workers))
    pid = workers.pop(victim)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, "a worker had ended by itself"
    workers[8 + n] = start(8 + n)
for pid in workers.values():
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, "a worker had ended by itself"
assert len(parent.trials(Key("parent", "cpu", "d", "l", "float32", 1, False))) == 1
print("done")
"""


def run(code, *args, **kw):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=env, timeout=120, **kw)


def sound(path):
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_eight_writers_and_fifty_kills_lose_nothing(path):
    done = run(KILLING, path, 50)
    assert (done.stdout, done.stderr) == ("done\n", "")
    s = Store(path)
    sound(path)
    held = {}
    for key, t in s.items():
        held.setdefault(key.problem, []).append(t)
    promised = 0
    logs = list(Path(path).parent.glob("*.log.*"))
    assert len(logs) > 20
    for log in logs:
        for name, i in (line.split() for line in log.read_text().splitlines()):
            assert [t.median_s for t in held[f"conv2d({name},{i})"]] == [(int(i) + j + 1) * 1e-6 for j in range(6)]
            promised += 1
    assert promised > 300
    assert all(len(ts) == 6 for problem, ts in held.items() if problem != "parent"), "a transaction in part"
    assert len(held) - 1 - promised <= 58  # those killed between the commit and their word of it
    s.close()
    assert not os.path.exists(path + ".damaged")


FORKING = """
import os, sys, threading, time
from tilewright.tune.store import Key, Store, Trial
store, stop = Store(sys.argv[1]), threading.Event()
def key(*name): return Key(str(name), "cpu", "d", "l", "float32", 1, False)
kept = []
def busy(n):
    i = 0
    while not stop.is_set():
        assert store.record(key(n, i), [Trial("k", (), 1, "s", "ok", 1.0)])
        kept.append(key(n, i))
        i += 1
threads = [threading.Thread(target=busy, args=(n,)) for n in range(4)]
for t in threads: t.start()
for c in range(12):
    time.sleep(0.02)
    pid = os.fork()
    if pid == 0:
        ok = all(store.record(key("child", c, i), [Trial("k", (), 1, "s", "ok", 1.0)]) for i in range(5))
        os._exit(0 if ok and len(store.trials(key("child", c, 0))) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop.set()
for t in threads: t.join()
assert all(len(store.trials(k)) == 1 for k in kept)
assert all(len(store.trials(key("child", c, i))) == 1 for c in range(12) for i in range(5))
print("done", len(kept) > 20)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_amid_writing_threads(path):
    done = run(FORKING, path)
    assert done.stdout == "done True\n", done.stderr  # newer Pythons warn of a fork amid threads on stderr
    sound(path)


INHERITED = """
import os, sys
from tilewright.tune.store import Key, Store, Trial
store = Store(sys.argv[1])
def key(name): return Key(name, "cpu", "d", "l", "float32", 1, False)
row = [Trial("k", (), 1, "s", "ok", 1.0)]
assert store.record(key("parent"), row)
to_child, to_parent = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    assert store.record(key("first"), row)
    os.write(to_parent[1], b"x")
    os.read(to_child[0], 1)
    assert store.record(key("second"), row)
    os._exit(0)
os.read(to_parent[0], 1)
store.close()  # the last one to close removes the log, which the parent must see that it is not
os.write(to_child[1], b"x")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(*sorted(k.problem for k, _ in store.items()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_parent_closes_while_its_child_writes(path):
    done = run(INHERITED, path)
    assert done.stdout == "first parent second\n", done.stderr


CROWD = """
import os, sys, warnings
from tilewright.tune.store import Key, Store, Trial
warnings.simplefilter("ignore")
def key(n): return Key(str(n), "cpu", "d", "l", "float32", 1, False)
for n in range(40):
    path = f"{sys.argv[1]}{n}"
    with open(path, "wb") as f:
        f.write(os.urandom(5000))
    gate, pids = os.pipe(), []
    for c in range(6):
        pids.append(os.fork())
        if pids[-1] == 0:
            store = Store(path)
            os.read(gate[0], 1)
            os._exit(0 if store.record(key(c), [Trial("k", (), 1, "s", "ok", 1.0)]) else 1)
    os.write(gate[1], bytes(6))
    assert [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids] == [0] * 6
    assert len(Store(path).items()) == 6, (n, [k.problem for k, _ in Store(path).items()])
    os.close(gate[0]), os.close(gate[1])
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_many_find_the_damage_at_once(tmp_path):
    """One moves the file aside, and none the new file that another has begun."""
    done = run(CROWD, tmp_path / "s")
    assert done.stdout == "done\n", done.stderr


def test_threads_share_a_store(store):
    failures = []

    def work(n):
        try:
            for i in range(20):
                key = replace(KEY, problem=f"{n} {i}")
                assert store.record(key, [trial("a", n + i + 1.0)])
                assert [t.median_s for t in store.ranking(key, CURRENT)] == [n + i + 1.0]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert store.status()["problems"] == 160


def test_a_store_locked_for_long(store, path, monkeypatch):
    store.record(KEY, [trial()])
    store.close()
    monkeypatch.setattr(module, "WAIT_S", 0.02)
    hung = sqlite3.connect(path, isolation_level=None)
    hung.execute("BEGIN IMMEDIATE")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not store.record(KEY, [trial("b")])
        assert not store.record(KEY, [trial("b")])
        assert store.trials(KEY) == [trial()]
    heard(caught, path, "locked")
    hung.execute("ROLLBACK")
    hung.close()
    assert store.record(KEY, [trial("b")])


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_truncated(path, share):
    held = filled(path)
    os.truncate(path, int(os.path.getsize(path) * share))
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key, rows in held.items():
            assert all(t in rows for t in s.trials(key))
        assert use(s)
        assert s.trials(KEY) == [trial()]
    if share:
        heard(caught, path, "damaged")
    s.close()
    if share < 0.99:  # of its last page, SQLite takes the part that is cut off for zeros: only the rows' checksums notice
        assert os.path.exists(path + ".damaged") == (share > 0)
        sound(path)
    assert all(t in held.get(key, [trial()]) for key, t in Store(path).items())


@pytest.mark.parametrize("content", [b"\0" * 5000, b"no database, but a text of someone's\n" * 200, b"x" * 600, random.Random(3).randbytes(9999)])
def test_garbage(path, content):
    Path(path).write_bytes(content)
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert use(s)
    heard(caught, path, "damaged")
    assert Path(path + ".damaged").read_bytes() == content
    assert s.trials(KEY) == [trial()]
    s.close()


@pytest.mark.parametrize("seed", range(12))
def test_bytes_changed_anywhere_give_no_false_row(path, seed):
    held = filled(path)
    rng = random.Random(seed)
    data = bytearray(Path(path).read_bytes())
    for _ in range(rng.choice([1, 8, 200])):
        at = rng.randrange(100 if seed % 2 else 0, len(data))
        data[at : at + 4] = rng.randbytes(len(data[at : at + 4]))
    Path(path).write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        s = Store(path)
        for key in held:
            for t in s.trials(key):
                assert t in held[key]
            for ahead in (False, True):
                for t in s.ranking(key, CURRENT, ahead):
                    assert t in [(h.kernel, h.config, h.median_s, h.spread_s, h.count, h.status) for h in held[key]]
        for key, t in s.items():
            assert t in held[key]
        s.record(KEY, [trial()])
    assert len(caught) <= 1
    assert all(str(w.message).startswith(path) for w in caught)
    s.close()


def test_one_bad_page_costs_what_was_on_it(path):
    held = filled(path, 400)
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2 // 4096 * 4096)
        f.write(b"\xff" * 4096)
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in held:
            s.trials(key)
    heard(caught, "damaged", "trials were saved")
    assert len(s.items()) > 500
    assert all(t in held[key] for key, t in s.items())
    s.close()
    sound(path)


@pytest.mark.parametrize("spoiled", [b"", b"\0" * 9000, b"\x7f" * 9000])
def test_a_spoiled_log(path, tmp_path, spoiled):
    """As after a power cut: the database with a write-ahead log that is cut off or garbage."""
    s = Store(path)
    s.record(KEY, [trial()])
    for suffix in ("", "-wal"):
        shutil.copy(path + suffix, str(tmp_path / "copy") + suffix)
    s.close()
    log = tmp_path / "copy-wal"
    log.write_bytes(log.read_bytes()[:3000] + spoiled)
    s = Store(tmp_path / "copy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert use(s)
    assert len(caught) <= 1
    assert s.trials(KEY) == [trial()]
    s.close()


def test_another_store_follows_the_new_file(path):
    """One has the file open when another finds it damaged and moves it aside."""
    filled(path)
    old = Store(path)
    assert old.trials(keys(1)[0])
    with open(path, "r+b") as f:
        f.write(b"\xff" * 3000)
    finder = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert finder.record(KEY, [trial("a")])
        assert old.record(KEY, [trial("b")])
        assert [t.kernel for t in finder.trials(KEY)] == ["a", "b"]
        assert old.trials(KEY) == finder.trials(KEY)
    heard(caught, "damaged")
    old.close()
    finder.close()
    sound(path)


def test_a_deleted_cache_begins_anew(store, path, tmp_path):
    store.record(KEY, [trial("a")])
    for file in os.listdir(tmp_path):
        os.unlink(tmp_path / file)
    assert store.record(KEY, [trial("b")])
    assert [t.kernel for t in Store(path).trials(KEY)] == ["b"]


@pytest.mark.parametrize("kind", ["other", "newer", "tables"])
def test_a_foreign_database_is_left_alone(path, kind):
    if kind == "newer":
        filled(path, 2)
    db = sqlite3.connect(path)
    if kind != "newer":
        db.execute("CREATE TABLE trials (x)")
    db.execute(f"PRAGMA {'application_id = 77' if kind == 'other' else 'user_version = 9' if kind == 'newer' else 'synchronous = 1'}")
    db.commit()
    db.close()
    before = Path(path).read_bytes()
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not use(s)
        assert not use(s)
        assert s.items() == []
    heard(caught, path, "reads 1" if kind == "newer" else "another program's", "TILEWRIGHT_CACHE")
    s.close()
    assert Path(path).read_bytes() == before
    assert not os.path.exists(path + ".damaged")


def test_our_header_without_our_tables(path):
    filled(path, 2)
    db = sqlite3.connect(path)
    db.execute("DROP TABLE trials")
    db.close()
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert use(s)
    heard(caught, "damaged", "no such table")
    assert s.trials(KEY) == [trial()]
    s.close()


# -- folders and disks -------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_folder():
    """A folder, and not the rights of the superuser, whom no mode stops."""
    folder = tempfile.mkdtemp()
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.chmod(folder, 0o700)
    if root:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.name == "nt", reason="modes of folders are POSIX's")
@pytest.mark.parametrize("present", [False, True])
def test_a_read_only_folder(plain_folder, present):
    path = os.path.join(plain_folder, "s")
    held = filled(path, 3) if present else {}
    with_lock = set(os.listdir(plain_folder))
    os.chmod(plain_folder, 0o500)
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key, rows in held.items():
            assert s.trials(key) == rows  # what is there can be used
        assert not caught
        assert not use(s)
        assert not use(s)
        assert len(s.items()) == 9 * present
    heard(caught, path, "TILEWRIGHT_CACHE")
    s.close()
    assert set(os.listdir(plain_folder)) == with_lock


@pytest.mark.skipif(os.name == "nt", reason="modes of files are POSIX's")
@pytest.mark.parametrize("mode", [0o400, 0o000])
def test_a_file_without_rights(plain_folder, mode):
    path = os.path.join(plain_folder, "s")
    held = filled(path, 3)
    os.chmod(path, mode)
    s = Store(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key, rows in held.items():
            assert s.trials(key) == (rows if mode else [])
        assert not use(s)
        assert not use(s)
    heard(caught, path, "TILEWRIGHT_CACHE")
    s.close()
    os.chmod(path, 0o600)
    assert Store(path).trials(keys(1)[0]) == held[keys(1)[0]]


def test_a_folder_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "store", tmp_path):
        s = Store(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not use(s)
            assert not use(s)
        heard(caught, str(path), "TILEWRIGHT_CACHE")


def test_a_full_disk(path):
    held = filled(path)
    s = Store(path)
    assert s.trials(keys(1)[0])
    s._db.execute("PRAGMA max_page_count = 1")  # no page more than there are
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        big = [trial("a", config=(("t", i),), reason="x" * 500) for i in range(100)]
        assert not s.record(KEY, big)
        assert not s.record(KEY, big)
        assert s.trials(KEY) == []
        assert all(s.trials(k) == rows for k, rows in held.items())
    heard(caught, path, "full", "free some space")
    s._db.execute("PRAGMA max_page_count = 100000")
    assert s.record(KEY, big)
    s.close()
    sound(path)
    assert not os.path.exists(path + ".damaged")


LIMITED = """
import resource, signal, sys, warnings
from tilewright.tune.store import Key, Store, Trial
key = Key("p", "cpu", "d", "l", "float32", 1, False)
def rows(n): return [Trial("k", (("t", i),), 1, "s", "ok", 1.0, 0.0, 1, "x" * 1000) for i in range(n)]
store = Store(sys.argv[1])
if sys.argv[2] == "open":
    assert store.record(key, rows(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert not store.record(key, rows(300))
    assert not store.record(key, rows(300))
    assert len(store.trials(key)) == (sys.argv[2] == "open")
assert len(caught) == 1 and sys.argv[1] in str(caught[0].message), [str(w.message) for w in caught]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("done", store.record(key, rows(2)), len(store.trials(key)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX's")
@pytest.mark.parametrize("state, limit", [("open", 60_000), ("new", 60_000), ("new", 2_000)])
def test_no_room_for_the_file_to_grow(path, state, limit):
    """The system itself refuses to write on, as a quota does; once it allows it, the store goes on."""
    done = run(LIMITED, path, state, limit)
    assert done.stdout == "done True 2\n", done.stdout + done.stderr
    sound(path)
    assert not os.path.exists(path + ".damaged")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_while_the_file_is_made(tmp_path):
    """Whenever a process dies on the way to its first row, the next finds a file that it can use."""
    code = """
import sys
from tilewright.tune.store import Key, Store, Trial
print(flush=True)
sys.stdin.read(1)
for i in range(400):
    Store(f"{sys.argv[1]}{i}").record(Key("p", "c", "d", "l", "f", 1, False), [Trial("k", (), 1, "s", "ok", 1.0)])
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as p:
        p.stdout.readline()
        p.stdin.write(b"x")
        p.stdin.close()
        time.sleep(0.3)
        p.kill()
    files = [f for f in os.listdir(tmp_path) if re.fullmatch(r"s\d+", f)]
    assert files
    for f in files[-40:]:
        s = Store(tmp_path / f)
        assert use(s)
        s.close()
