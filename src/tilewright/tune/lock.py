"""A lock file: the kernels of one tuning, written down to be used again on another run or machine of the same kind.

JSON, sorted, one line a problem, so that it can be read, compared and kept under version control.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright._files import write_atomically
from tilewright.devices.api import Config
from tilewright.errors import DataError
from tilewright.tune.store import config_text, parse_config

FORMAT = "tilewright-lock"
VERSION = 1
_FIELDS = {"kernel": str, "config": dict, "version": int}


@dataclass(frozen=True)
class Choice:
    """The kernel that a problem is pinned to: its id, its config and the version it had."""

    kernel: str
    config: Config = ()
    version: int = 1


class Lock:
    """Choices by problem text (`tilewright.tune.store.problem_text`), for each kind of device on its own."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """An empty lock that `write` puts at `path`; `Lock.read` has one that is there."""
        self.path = os.fspath(path)
        self._choices: dict[tuple[str, str], Choice] = {}

    def get(self, problem: str, device: str = "cpu") -> Choice | None:
        """The choice for the problem on this kind of device; None if it has none (`missing` then says what to do)."""
        return self._choices.get((device, problem))

    def set(self, problem: str, choice: Choice, device: str = "cpu") -> None:
        """Pin a problem, in place of an earlier choice."""
        config_text(choice.config)
        self._choices[device, problem] = choice

    def items(self) -> Iterator[tuple[str, str, Choice]]:
        """(kind of device, problem, choice), sorted."""
        for (device, problem), choice in sorted(self._choices.items(), key=lambda item: item[0]):
            yield device, problem, choice

    def __len__(self) -> int:
        return len(self._choices)

    def missing(self, problem: str, device: str = "cpu") -> str:
        """The message for a problem that has no choice here."""
        return (
            f"{self.path}: pins no kernel for {problem} on {device}, and a lock allows no other choice; "
            f"add it by tuning the same model or shapes again with --lock {self.path}, or unset TILEWRIGHT_LOCK"
        )

    def write(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the file, whole or not at all. Raises DataError naming it."""
        lines: dict[str, list[str]] = {}
        for device, problem, c in self.items():
            entry = f'"kernel": {json.dumps(c.kernel)}, "config": {config_text(c.config)}, "version": {json.dumps(c.version)}'
            lines.setdefault(device, []).append(f"      {json.dumps(problem)}: {{{entry}}}")
        groups = [f"    {json.dumps(device)}: {{\n" + ",\n".join(entries) + "\n    }" for device, entries in lines.items()]
        choices = "{\n" + ",\n".join(groups) + "\n  }" if groups else "{}"
        text = f'{{\n  "format": "{FORMAT}",\n  "version": {VERSION},\n  "choices": {choices}\n}}\n'
        write_atomically(self.path if path is None else os.fspath(path), text.encode(), DataError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Lock:
        """The lock in a file. Raises DataError naming the file, and the line where there is one, if anything in it is wrong."""
        lock = cls(path)
        try:
            with open(lock.path, "rb") as f:
                text = f.read().decode()
        except OSError as error:
            raise DataError(f"{lock.path}: could not be read ({error.strerror or error}); make a lock with `tilewright tune --lock FILE`") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{lock.path}: is not a lock file, as it is not text ({error}); {_REMEDY}") from error
        try:
            content = json.loads(text, object_pairs_hook=_once)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f'it is not a lock file, which holds "format": "{FORMAT}"')
            if content.get("version") != VERSION:
                raise ValueError(f"it is of version {json.dumps(content.get('version'))}, and this Tilewright reads {VERSION}")
            choices = content.get("choices")
            if set(content) != {"format", "version", "choices"} or not isinstance(choices, dict):
                raise ValueError('it must hold "format", "version" and "choices" (an object), and no more')
            for device, entries in choices.items():
                if not isinstance(entries, dict):
                    raise _Misplaced((device,), "a kind of device must have an object of problems")
                for problem, entry in entries.items():
                    lock._choices[device, problem] = _choice((device, problem), entry)
        except json.JSONDecodeError as error:
            raise DataError(f"{lock.path}, line {error.lineno}: {error.msg}; {_REMEDY}") from error
        except _Misplaced as error:
            raise DataError(f"{lock.path}{_line(text, error.names)}: {error.names[-1]}: {error}; {_REMEDY}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{lock.path}: {error}; {_REMEDY}") from error
        return lock


_REMEDY = "mend it, or make it anew with `tilewright tune --lock FILE`"


class _Misplaced(Exception):
    """Something wrong at a name within others, by which its line is found."""

    def __init__(self, names: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.names = names


def _line(text: str, names: tuple[str, ...]) -> str:
    at = 0
    for name in names:
        found = re.compile(re.escape(json.dumps(name)) + r"\s*:").search(text, at)
        if found is None:  # spelt in another way, with other escapes
            return ""
        at = found.start()
    return f", line {text.count(chr(10), 0, at) + 1}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Misplaced((next(n for n in names if names.count(n) > 1),), "it is given twice")
    return out


def _choice(names: tuple[str, ...], entry: Any) -> Choice:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise _Misplaced(names, f"a choice is an object with {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind:
            raise _Misplaced(names, f"{name} is {json.dumps(entry[name])} and must be {'an object' if kind is dict else kind.__name__}")
    try:
        config = parse_config(json.dumps(entry["config"]))
        config_text(config)
        return Choice(entry["kernel"], config, entry["version"])
    except ValueError as error:
        raise _Misplaced(names, str(error)) from error
