"""Every measurement ever made, in one SQLite file that many processes share and none can spoil.

A row is one trial: a candidate (kernel and config) on one problem, under one `Key`. The file is a convenience: if it
is damaged, foreign, read-only, locked or on a full disk, reads give nothing, writes are dropped, and one
RuntimeWarning per process says so. Every row carries a checksum over itself and its key, as SQLite's pages carry none.

Write-ahead logging lets readers go on while one process writes, and makes a killed writer's transaction vanish whole
(https://www.sqlite.org/wal.html). A power cut may lose the last commits, never the file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import operator
import os
import random
import re
import sqlite3
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from tilewright._files import write_atomically
from tilewright.devices.api import CONTIGUOUS, Config, Kernel, Problem, Spec
from tilewright.dtypes import DType
from tilewright.errors import ArgumentError, DataError

T = TypeVar("T")

STATUSES = ("ok", "wrong", "failed", "timeout", "over-limit")
APPLICATION_ID = 0x54574B53  # "TWKS" in the file's header, so that a foreign database is known as such
SCHEMA = 1
FORMAT = {"format": "tilewright-trials", "version": 1}
WAIT_S = 5.0  # for another process's write
ATTEMPTS = 4
MOST_AHEAD = 20_000  # rows read ahead: some 50 ms

_SCHEMA = """
CREATE TABLE problems (
  id INTEGER PRIMARY KEY, problem TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL, library TEXT NOT NULL,
  precision TEXT NOT NULL, threads INTEGER NOT NULL, deterministic INTEGER NOT NULL,
  UNIQUE (problem, device, driver, library, precision, threads, deterministic));
CREATE TABLE trials (
  problem INTEGER NOT NULL, kernel TEXT NOT NULL, config TEXT NOT NULL, version INTEGER NOT NULL, source TEXT NOT NULL,
  status TEXT NOT NULL, median REAL, spread REAL, count INTEGER NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
  crc INTEGER NOT NULL, PRIMARY KEY (problem, kernel, config)) WITHOUT ROWID;
"""
_SAME_KEY = "problem = ? AND device = ? AND driver = ? AND library = ? AND precision = ? AND threads = ? AND deterministic = ?"
_ID = f"SELECT id FROM problems WHERE {_SAME_KEY}"
_ROW = "kernel, config, version, source, status, median, spread, count, reason, at, crc"
_TRIALS = f"SELECT {_ROW} FROM trials WHERE problem = ({_ID})"
_PLACE = f"""
SELECT p.problem, {_ROW} FROM trials t JOIN problems p ON p.id = t.problem WHERE status = 'ok'
AND device = ? AND driver = ? AND library = ? AND precision = ? AND threads = ? AND deterministic = ? LIMIT ?"""
_KEY = "problem, device, driver, library, precision, threads, deterministic"
_PUT_KEY = f"INSERT OR IGNORE INTO problems ({_KEY}) VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT = f"INSERT OR REPLACE INTO trials (problem, {_ROW}) VALUES ({', '.join('?' * 12)})"
_AGE = "SELECT at FROM trials WHERE problem = ? AND kernel = ? AND config = ?"
_ALL = f"""
SELECT p.problem, device, driver, library, precision, threads, deterministic, {_ROW} FROM trials t JOIN problems p ON p.id = t.problem
ORDER BY p.problem, device, driver, library, precision, threads, deterministic, kernel, config"""
_GROUP = "device, driver, library, kernel, version, source"
_GROUPS = f"SELECT {_GROUP}, count(*) FROM trials t JOIN problems p ON p.id = t.problem GROUP BY {_GROUP}"
_DROP_GROUP = """
DELETE FROM trials WHERE problem IN (SELECT id FROM problems WHERE device = ? AND driver = ? AND library = ?)
AND kernel = ? AND version = ? AND source = ?"""
_DROP_BARE = "DELETE FROM problems WHERE id NOT IN (SELECT problem FROM trials)"

Current = Mapping[str, tuple[int, str]]  # kernel id -> (version, source hash)
Devices = Mapping[str, tuple[str, str]]  # device -> (driver, library) as they are now


@dataclass(frozen=True)
class Key:
    """What a measurement holds for: exactly this problem, there, under these versions and settings."""

    problem: str  # problem_text(...)
    device: str  # name or fingerprint
    driver: str
    library: str
    precision: str
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class Trial:
    """One candidate's measurement. `median_s` and `spread_s` in seconds (None unless timed), `when` in Unix time.

    Raises ArgumentError for an unknown status or times that are not finite; a trial that is ok has a median.
    """

    kernel: str
    config: Config
    version: int
    source: str  # source_hash(kernel)
    status: str  # one of STATUSES
    median_s: float | None = None
    spread_s: float | None = None
    count: int = 0
    reason: str = ""
    when: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ArgumentError(f"a trial's status {self.status!r} is not one of {', '.join(STATUSES)}")
        if self.status == "ok" and self.median_s is None:
            raise ArgumentError(f"a trial of {self.kernel} is ok and has no median; give median_s in seconds")
        for name in ("median_s", "spread_s", "when"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ArgumentError(f"a trial of {self.kernel} has {name}={value}; it must be finite and not negative")


class Timed(NamedTuple):
    """Of a trial that is ok, what a choice is made by."""

    kernel: str
    config: Config
    median_s: float
    spread_s: float | None
    count: int
    status: str = "ok"


# -- texts and hashes --------------------------------------------------------------------------------------------------


def problem_text(problem: Problem) -> str:
    """The problem in one line, exact and the same in every process: two problems have one text only if they are equal.

    Raises ArgumentError for an attribute of a type that has no such text.
    """
    inputs = ", ".join(["-" if s is None else _spec_text(s) for s in problem.inputs])
    outputs = ", ".join([_spec_text(s) for s in problem.outputs])
    attrs = "" if problem.attrs is None else f" {problem.attrs!r}"  # plain values, whose repr is exact: 1, 1.0 and True differ
    if " at 0x" in attrs or "array(" in attrs:
        _check_attr(problem.attrs, problem)
    return f"{problem.op}({inputs}) -> ({outputs}){attrs} precision={problem.precision}"


@functools.lru_cache(maxsize=1024)
def _spec_text(s: Spec) -> str:
    return f"{s.dtype.name}[{','.join(map(str, s.shape))}]{'' if s.layout == CONTIGUOUS else ' ' + s.layout}"


def _check_attr(value: Any, problem: Problem) -> None:
    """Raises ArgumentError for what has no text of its own."""
    kind = type(value)
    if isinstance(value, tuple):
        for v in value:
            _check_attr(v, problem)
    elif value is not None and kind not in (int, float, bool, str, DType):
        raise ArgumentError(
            f"{problem.op}: an attribute of type {kind.__name__} cannot key a measurement; use numbers, strings, dtypes, None or tuples of them"
        )


def config_text(config: Config) -> str:
    """A config as a JSON object. Raises ArgumentError for a name given twice or a value that JSON would not give back."""
    try:
        pairs = dict(config)
        if len(pairs) != len(config) or not all(type(name) is str for name in pairs):
            raise ValueError("names must be strings, each given once")
        for value in pairs.values():
            _check_plain(value)
        return json.dumps(pairs, separators=(", ", ": "), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"config {config!r} cannot be stored: {error}; use (name, value) pairs of numbers, strings, None or tuples") from error


def _check_plain(value: Any) -> None:
    if type(value) is tuple:
        for v in value:
            _check_plain(v)
    elif value is not None and type(value) not in (int, float, bool, str):
        raise TypeError(f"a value is of type {type(value).__name__}")


@functools.lru_cache(maxsize=4096)
def parse_config(text: str) -> Config:
    """The config of a text made by `config_text`, equal to the one it was made of. Raises ValueError."""
    return _config_of(json.loads(text))


def _config_of(pairs: Any) -> Config:
    if not isinstance(pairs, dict):
        raise ValueError("config is not an object of names and values")
    return tuple([(name, _tuples(value)) for name, value in pairs.items()])


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("a config's value is an object; only numbers, strings, null and lists can be")
    return tuple([_tuples(v) for v in value]) if isinstance(value, list) else value


@functools.cache
def source_hash(kernel: Kernel) -> str:
    """16 hex digits over the source files that define the kernel: its class and bases, functions it was given, and what
    those files use of other modules of the same device.

    A `.cl` file beside a module and of its name belongs to it. A module without a file counts by its name alone.
    """
    modules = {c.__module__ for c in type(kernel).__mro__ if issubclass(c, Kernel) and c is not Kernel}
    modules |= {v.__module__ for v in vars(kernel).values() if isinstance(v, FunctionType)}
    found: set[str] = set()
    while modules:
        name = modules.pop()
        found.add(name)
        modules |= _uses(name) - found
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name}\n".encode())
        digest.update(_module_digest(name))
    return digest.hexdigest()[:16]


@functools.cache
def _uses(name: str) -> frozenset[str]:
    """The modules of `tilewright.devices.<kind>.` whose functions, classes or objects stand in the module's namespace."""
    kind = re.match(r"tilewright\.devices\.\w+\.", name)
    if kind is None or name not in sys.modules:
        return frozenset()
    values = vars(sys.modules[name]).values()
    homes = (v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values)
    return frozenset(h for h in homes if isinstance(h, str) and h.startswith(kind[0]))


@functools.cache
def _module_digest(name: str) -> bytes:
    digest = hashlib.sha256()
    file = getattr(sys.modules.get(name), "__file__", None)
    for path in () if file is None else (Path(file), Path(file).with_suffix(".cl")):
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.digest()


# -- the file ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where Tilewright keeps what it can measure again: TILEWRIGHT_CACHE, or the user's cache folder."""
    given = os.environ.get("TILEWRIGHT_CACHE")
    if given:
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tilewright", appauthor=False))


# One lock for all stores of the process: a database must not be open across a fork, not even unused (POSIX locks belong
# to a process, and SQLite keeps count of them in memory that the child would inherit), so a fork waits for whoever is
# at work, and all connections are closed for it. Each side opens its own when it next needs one.
_lock = threading.RLock()
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_warned: set[str] = set()


def _before_fork() -> None:
    _lock.acquire()
    for store in list(_stores):
        store._drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Foreign(Exception):
    """The file is a database, and not one of ours."""


class Store:
    """Trials by key, kept in one file. Threads and processes may share it; no method raises for the file's state.

    `path`: the file; by default `tuning.sqlite3` in `cache_folder()`. It is opened at first use and made at the first
    `record`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = os.path.abspath(cache_folder() / "tuning.sqlite3" if path is None else os.fspath(path))
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._readonly = False
        self._off = False  # foreign or out of reach: not tried again in this process
        self._ahead: dict[tuple[Any, ...], dict[str, list[Any]]] = {}  # what was read ahead, by place and problem
        _stores.add(self)

    # -- rows

    def record(self, key: Key, trials: Iterable[Trial]) -> bool:
        """Keep the trials, all or none, each in place of the same candidate's older one. Whether they were kept."""
        return self._put([(key, t) for t in trials], newer_only=False) is not None

    def trials(self, key: Key) -> list[Trial]:
        """Every trial of the key, in order of kernel and config; stale ones too."""
        return self._select(key, lambda row: True, _trial)

    def ranking(self, key: Key, current: Current, ahead: bool = False) -> list[Timed]:
        """What is ok, and of the kernels as they are in `current`, fastest median first.

        ahead: read all problems of the key's device and versions at the first call, unless there are very many, so that the
        next ones need not go to the file. What other processes write after that is seen for new problems only.
        """
        if ahead:
            place = (key.device, key.driver, key.library, key.precision, key.threads, key.deterministic)
            known = self._ahead.get(place)
            if known is None:
                known = self._ahead[place] = self._read_ahead(place)
            there = known.get(key.problem)
            if there is not None:
                return [t for t, now in there if current.get(t.kernel) == now]
        found = self._select(key, lambda row: row[4] == b"ok" and _is_now(row, current), _timed)
        found.sort(key=_by_median)
        return found

    def _read_ahead(self, place: tuple[Any, ...]) -> dict[str, list[Any]]:
        """Of all problems of a device and versions what is ok, fastest first: (what was timed, of which version and source)."""
        rows = self._read(lambda db: db.execute(_PLACE, (*place[:5], int(place[5]), MOST_AHEAD + 1)).fetchall(), [])
        known: dict[str, list[Any]] = {}
        seeds: dict[bytes, tuple[str, int]] = {}
        for text, *row in rows if len(rows) <= MOST_AHEAD else ():
            if text not in seeds:
                problem = text.decode(errors="replace")
                seeds[text] = problem, _key_crc(Key(problem, *place))
            problem, seed = seeds[text]
            with contextlib.suppress(*_BAD_ROW):  # asked for by itself, it gives a warning
                known.setdefault(problem, []).append((_timed(row, seed), (row[2], row[3].decode())))
        for found in known.values():
            found.sort(key=lambda entry: entry[0].median_s)
        return {problem: found for problem, found in known.items() if found}

    def items(self) -> list[tuple[Key, Trial]]:
        """Every trial with its key, ordered."""
        out = []
        for row in self._read(lambda db: db.execute(_ALL).fetchall(), []):
            with contextlib.suppress(*_BAD_ROW):
                key = _key(row[:7])
                out.append((key, _trial(row[7:], _key_crc(key))))
        return out

    def delete(self, key: Key, kernel: str | None = None, config: Config | None = None) -> int:
        """Forget the key's trials (of one kernel, of one config). How many there were."""
        conditions, values = f"problem = ({_ID})", list(_values(key))
        for name, value in (("kernel", kernel), ("config", None if config is None else config_text(config))):
            if value is not None:
                conditions += f" AND {name} = ?"
                values.append(value)

        def work(db: sqlite3.Connection) -> int:
            gone = db.execute(f"DELETE FROM trials WHERE {conditions}", values).rowcount
            db.execute(_DROP_BARE)
            return gone

        return self._write(work, create=False) or 0

    def prune(self, devices: Devices, kernels: Current | None = None) -> int:
        """Forget stale trials of the named devices: other drivers or libraries, and kernels that have changed or gone.

        `devices`: device -> (driver, library) now. `kernels`: kernel id -> (version, source hash) now, of all kernels of
        these devices; None leaves kernels out of it. Trials of other devices stay. How many were removed.
        """

        def work(db: sqlite3.Connection) -> int:
            stale = [group[:6] for group in db.execute(_GROUPS).fetchall() if _stale(group, devices, kernels)]
            gone = sum([db.execute(_DROP_GROUP, [_text(v) for v in group]).rowcount for group in stale])
            db.execute(_DROP_BARE)
            return gone

        gone = self._write(work, create=False) or 0
        if gone:
            with contextlib.suppress(sqlite3.Error), _lock:
                if self._db is not None:
                    self._db.execute("VACUUM")
        return gone

    def status(self, devices: Devices | None = None, kernels: Current | None = None) -> dict[str, Any]:
        """`path`, `bytes`, `problems`, `trials` by status, and `stale` by what has changed (see `prune`)."""

        def work(db: sqlite3.Connection) -> tuple[int, list[Any], list[Any]]:
            problems = db.execute("SELECT count(*) FROM problems").fetchone()[0]
            return problems, db.execute("SELECT status, count(*) FROM trials GROUP BY status").fetchall(), db.execute(_GROUPS).fetchall()

        problems, by_status, groups = self._read(work, (0, [], []))
        counts = {_text(name): n for name, n in by_status}
        stale: dict[str, int] = {"driver": 0, "library": 0, "kernel": 0}
        for group in groups:
            why = _stale(group, devices or {}, kernels)
            if why:
                stale[why] += group[6]
        size = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(OSError):
                size += os.stat(self.path + suffix).st_size
        return {"path": self.path, "bytes": size, "problems": problems, "trials": {s: counts.get(s, 0) for s in STATUSES}, "stale": stale}

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write every trial to a file of JSON lines, whole or not at all. How many. Raises DataError naming the file."""
        rows = self.items()
        lines = [{**FORMAT, "count": len(rows)}, *[{**asdict(k), **asdict(t), "config": dict(t.config)} for k, t in rows]]
        write_atomically(os.fspath(file), "".join([json.dumps(line) + "\n" for line in lines]).encode(), DataError)
        return len(rows)

    def import_(self, file: str | os.PathLike[str]) -> int:
        """Take in an exported file; a trial here that is newer stays. How many were taken.

        Raises DataError naming file and line, and changes nothing, when anything in it is wrong.
        """
        return self._put(_parse(os.fspath(file)), newer_only=True) or 0

    def close(self) -> None:
        """Close the file. The store may be used again, which opens it anew."""
        with _lock:
            self._ahead.clear()
            self._drop()

    def __del__(self) -> None:
        db = getattr(self, "_db", None)
        if db is not None:
            db.close()

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    # -- reading and writing

    def _select(self, key: Key, wanted: Callable[[Any], bool], make: Callable[[Any, int], T]) -> list[T]:
        rows = self._read(lambda db: db.execute(_TRIALS, _values(key)).fetchall(), [])
        out = []
        seed = _key_crc(key) if rows else 0
        for row in rows:
            if wanted(row):
                try:
                    out.append(make(row, seed))
                except _BAD_ROW:
                    self._warn("some rows are damaged and count as not measured; measure again, or delete the file")
        return out

    def _put(self, rows: list[tuple[Key, Trial]], newer_only: bool) -> int | None:
        """How many were put; None if the write was dropped."""
        ready: dict[Key, list[tuple[Any, ...]]] = {}
        for key, t in rows:
            ready.setdefault(key, []).append(_row(key, t))

        def work(db: sqlite3.Connection) -> int:
            count = 0
            for key, news in ready.items():
                db.execute(_PUT_KEY, _values(key))
                number = db.execute(_ID, _values(key)).fetchone()[0]
                for row in news:
                    if newer_only:
                        old = db.execute(_AGE, (number, row[0], row[1])).fetchone()
                        if old is not None and old[0] >= row[9]:
                            continue
                    db.execute(_PUT, (number, *row))
                    count += 1
            return count

        return self._write(work, create=True) if rows else 0

    def _read(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        found = self._attempt(work, create=False)
        return default if found is None else found

    def _write(self, work: Callable[[sqlite3.Connection], T], create: bool) -> T | None:
        self._ahead.clear()

        def transaction(db: sqlite3.Connection) -> T | None:
            if self._readonly:
                self._warn("the store cannot be written, so new measurements are not kept; TILEWRIGHT_CACHE names another folder")
                return None
            db.execute("BEGIN IMMEDIATE")
            try:
                result = work(db)
                db.execute("COMMIT")
                return result
            finally:
                if db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")

        return self._attempt(transaction, create, moved=True)

    def _attempt(self, work: Callable[[sqlite3.Connection], T], create: bool, moved: bool = False) -> T | None:
        """`work`'s result; None where the file has nothing to give or cannot be used, with a warning unless it is absent."""
        with _lock:
            for attempt in range(ATTEMPTS):
                try:
                    if moved and self._db is not None and self._elsewhere():
                        self._drop()
                    db = self._db or self._open(create)
                    return None if db is None else work(db)
                except _Foreign as error:
                    self._off = True
                    self._warn(f"{error}; it stays as it is and measurements are not kept; move it, or name another folder by TILEWRIGHT_CACHE")
                    return None
                except (sqlite3.Error, OSError) as error:
                    if not self._mend(error, last=attempt == ATTEMPTS - 1):
                        return None
        return None

    def _mend(self, error: Exception, last: bool) -> bool:
        """Whether to try again after `error`; if not, a warning has been given."""
        code = _code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            if last:
                self._warn(f"other processes keep the store locked ({error}), so measurements are not kept; end those that hang")
            else:
                time.sleep(random.random() * 0.05)
            return not last
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
            self._warn(f"measurements are not kept ({error}); free some space, or name another folder by TILEWRIGHT_CACHE")
            return False
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH) or isinstance(error, OSError):
            self._off = self._db is None
            self._warn(f"the store cannot be used here ({error}), so measurements are not kept; TILEWRIGHT_CACHE names another folder")
            return False
        if not last and self._set_aside():
            return True
        self._warn(f"the store cannot be used ({error}), so measurements are not kept; delete the file, or name another folder by TILEWRIGHT_CACHE")
        return False

    # -- opening, closing, moving aside

    def _open(self, create: bool) -> sqlite3.Connection | None:
        if self._off or not (create or os.path.exists(self.path)):
            return None
        if create:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with _alone(self.path):
            try:
                self._db, self._readonly = self._connect(), False
            except sqlite3.Error as error:
                if _code(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM) or not os.path.exists(self.path):
                    raise
                # A log cannot be made beside the file; what the file itself holds can still be read.
                self._db, self._readonly = self._connect(immutable=True), True
            self._inode = os.stat(self.path).st_ino
        return self._db

    def _connect(self, immutable: bool = False) -> sqlite3.Connection:
        """A connection to a file that is known to be ours, made if it was empty. Raises _Foreign and sqlite3.Error."""
        target = Path(self.path).as_uri() + "?mode=ro&immutable=1" if immutable else self.path
        db = sqlite3.connect(target, timeout=WAIT_S, isolation_level=None, check_same_thread=False, uri=immutable)
        try:
            db.text_factory = bytes  # checked against the row's checksum before anything is made of it
            db.execute("PRAGMA synchronous = NORMAL")
            if not self._ours(db):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("BEGIN IMMEDIATE")
                if not self._ours(db):
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version = {SCHEMA}")
                db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _ours(self, db: sqlite3.Connection) -> bool:
        """True for a file of ours, False for an empty one; raises _Foreign for any other."""
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if application == APPLICATION_ID and version == SCHEMA:
            return True
        if application == APPLICATION_ID:
            raise _Foreign(f"the store has layout {version} and this Tilewright reads {SCHEMA}")
        if application or version or db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _Foreign("the file is another program's database")
        return False

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _elsewhere(self) -> bool:
        """Whether the file that is open no longer lies at its path: it was moved aside or deleted by someone."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return True

    def _set_aside(self) -> bool:
        """Move a damaged file to `*.damaged`. False where that cannot be; True too if another has done it already."""
        self._drop()
        with _alone(self.path) as held:
            if not held:
                return False
            damage = self._damage()
            if damage is None:
                return True
            try:
                # The log first: one left behind would be replayed into the new file.
                for suffix in ("-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self.path + suffix, self.path + ".damaged" + suffix)
            except OSError:
                return False
            rows = _salvage(self.path + ".damaged")
        saved = self._put(rows, newer_only=True) or 0
        self._warn(f"the store was damaged ({damage}) and lies in {self.path}.damaged now; {saved} trials were saved, measure the others again")
        return True

    def _damage(self) -> str | None:
        """What is wrong with the file at the path now, by a connection of its own; None if nothing is, or it is in use."""
        try:
            db = self._connect()
        except _Foreign:
            return None
        except sqlite3.Error as error:
            return str(error) if _code(error) in _DAMAGE else None
        try:
            for query in (_TRIALS, _AGE):
                db.execute(query, (0,) * query.count("?"))
            found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            return None if found == b"ok" else found.decode(errors="replace")
        except sqlite3.Error as error:
            return str(error) if _code(error) in _DAMAGE else None
        finally:
            db.close()

    def _warn(self, message: str) -> None:
        if self.path not in _warned:
            _warned.add(self.path)
            warnings.warn(f"{self.path}: {message}", RuntimeWarning, stacklevel=2)


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # an I/O error may pass, and a file that is sound then must stay


def _code(error: Exception) -> int | None:
    """SQLite's primary result code."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """While opening or moving the file: nobody may open it between the moves of its log and itself. Gives up after WAIT_S."""
    try:
        f = open(path + ".lock", "ab")  # noqa: SIM115
    except OSError:
        yield False
        return
    with f:
        until = time.monotonic() + WAIT_S
        while not (held := _try_lock(f.fileno())) and time.monotonic() < until:
            time.sleep(0.002)
        try:
            yield held
        finally:
            if held:
                _unlock(f.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            return True
        except OSError:
            return False

    def _unlock(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False

    def _unlock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


# -- rows as they lie in the file --------------------------------------------------------------------------------------

_NUMBERS = struct.Struct("<qddqd").pack
_BAD_ROW = (ValueError, TypeError, AttributeError, struct.error)


def _values(key: Key) -> tuple[Any, ...]:
    return (key.problem, key.device, key.driver, key.library, key.precision, key.threads, int(key.deterministic))


def _key_crc(key: Key) -> int:
    return crc32("\0".join([str(v) for v in _values(key)]).encode())


def _crc(row: Any, seed: int) -> int:
    """Over all columns but the last, texts as bytes; not a number for a time that is not there. Raises TypeError and struct.error."""
    kernel, config, version, source, status, median, spread, count, reason, at = row[:10]
    numbers = _NUMBERS(version, math.nan if median is None else median, math.nan if spread is None else spread, count, at)
    return crc32(b"\0".join((kernel, config, source, status, reason, numbers)), seed)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _row(key: Key, t: Trial) -> tuple[Any, ...]:
    texts = [s.encode("utf-8", "backslashreplace") for s in (t.kernel, config_text(t.config), t.source, t.status, t.reason)]
    kernel, config, source, status, reason = texts
    row = (kernel, config, int(t.version), source, status, _float(t.median_s), _float(t.spread_s), int(t.count), reason, float(t.when))
    return (*[_text(v) for v in row], _crc(row, _key_crc(key)))


def _trial(row: Any, seed: int) -> Trial:
    """Raises one of _BAD_ROW for a row that is not as it was written."""
    if _crc(row, seed) != row[10]:
        raise ValueError("checksum")
    kernel, config, version, source, status, median, spread, count, reason, at, _ = row
    trial = object.__new__(Trial)  # it was checked when it was written
    trial.__dict__.update(
        kernel=kernel.decode(), config=parse_config(config.decode()), version=version, source=source.decode(), status=status.decode(),
        median_s=median, spread_s=spread, count=count, reason=reason.decode(), when=at,
    )  # fmt: skip
    return trial


def _timed(row: Any, seed: int) -> Timed:
    """As `_trial`, of a row that is ok, and with no more than a choice needs: this is on the way to a first call."""
    if _crc(row, seed) != row[10]:
        raise ValueError("checksum")
    return Timed(_name(row[0]), _config(row[1]), row[5], row[6], row[7])


_name = functools.lru_cache(maxsize=4096)(bytes.decode)
_config = functools.lru_cache(maxsize=4096)(lambda text: parse_config(text.decode()))
_by_median = operator.attrgetter("median_s")


def _is_now(row: Any, current: Current) -> bool:
    now = current.get(_text(row[0]))
    return now is not None and row[2] == now[0] and _text(row[3]) == now[1]


def _salvage(file: str) -> list[tuple[Key, Trial]]:
    """What can still be read in a damaged file and is as it was written."""
    rows: list[tuple[Key, Trial]] = []
    keys: list[Any] = []
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.text_factory = bytes
        with contextlib.suppress(sqlite3.Error):
            keys.extend(db.execute(f"SELECT id, {_KEY} FROM problems NOT INDEXED"))  # as far as it goes
        for number, *values in keys:
            with contextlib.suppress(sqlite3.Error, *_BAD_ROW):
                key = _key(values)
                for row in db.execute(f"SELECT {_ROW} FROM trials WHERE problem = ?", (number,)):
                    with contextlib.suppress(*_BAD_ROW):
                        rows.append((key, _trial(row, _key_crc(key))))
    return rows


def _key(row: Any) -> Key:
    return Key(*[v.decode() for v in row[:5]], row[5], bool(row[6]))  # type: ignore[arg-type]


def _stale(group: Any, devices: Devices, kernels: Current | None) -> str | None:
    device, driver, library, kernel, version, source = [_text(v) for v in group[:6]]
    now = devices.get(device)
    if now is None:
        return None
    if driver != now[0]:
        return "driver"
    if library != now[1]:
        return "library"
    return "kernel" if kernels is not None and kernels.get(kernel) != (version, source) else None


# -- exported files ----------------------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    "threads": (int,), "deterministic": (bool,), "config": (dict,), "version": (int,), "median_s": (float, int, type(None)),
    "spread_s": (float, int, type(None)), "count": (int,), "when": (float, int),
}  # fmt: skip
_KEY_NAMES = [f.name for f in fields(Key)]
_TRIAL_NAMES = [f.name for f in fields(Trial)]


def _parse(file: str) -> list[tuple[Key, Trial]]:
    try:
        lines = Path(file).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{file}: could not be read ({error.strerror or error})") from error
    if lines[-1] == b"":
        lines.pop()
    rows: list[tuple[Key, Trial]] = []
    number, count = 1, 0
    try:
        for number, line in enumerate(lines or [b""], 1):
            entry = json.loads(line)
            if number == 1:
                if not isinstance(entry, dict) or {**entry, **FORMAT} != entry or type(entry.get("count")) is not int:
                    raise ValueError(f"a file of trials begins with {json.dumps(FORMAT)[:-1]}, ...}}")
                count = entry["count"]
            else:
                rows.append(_entry(entry))
        if len(rows) != count:
            raise ValueError(f"the file ends after {len(rows)} trials and its first line promises {count}")
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file}, line {number}: {error}; nothing was imported; export the file again or mend the line") from error
    return rows


def _entry(entry: Any) -> tuple[Key, Trial]:
    if not isinstance(entry, dict) or set(entry) != {*_KEY_NAMES, *_TRIAL_NAMES}:
        raise ValueError(f"a trial is an object with {', '.join([*_KEY_NAMES, *_TRIAL_NAMES])}")
    for name, value in entry.items():
        allowed = _TYPES.get(name, (str,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{name} is {json.dumps(value)} and must be {' or '.join([t.__name__ for t in allowed])}")
    config = _config_of(entry["config"])
    config_text(config)
    return Key(**{n: entry[n] for n in _KEY_NAMES}), Trial(**{**{n: entry[n] for n in _TRIAL_NAMES}, "config": config})
