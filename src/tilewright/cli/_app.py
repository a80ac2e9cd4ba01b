"""The application: finds the command files in this folder."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import typer

import tilewright.cli

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train and run convolutional networks.")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        print(tilewright.__version__)
        raise typer.Exit


def emit(value: Any) -> None:
    """One JSON document on standard output; numbers JSON has no name for become null."""

    def clean(v: Any) -> Any:
        if isinstance(v, dict):
            return {str(k): clean(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [clean(x) for x in v]
        if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))):
            return None
        return v

    print(json.dumps(clean(value), indent=2))


for _info in pkgutil.iter_modules(tilewright.cli.__path__):
    if not _info.name.startswith("_"):
        app.command(_info.name)(importlib.import_module(f"tilewright.cli.{_info.name}").run)
