"""The command `tilewright`: one file per command. Every command takes --json."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: a refusal of ours is one clear line and exit code 2; Ctrl-C is 130 (typer's)."""
    from tilewright.cli._app import app
    from tilewright.errors import TilewrightError

    try:
        app()
    except (TilewrightError, OSError) as error:
        print(f"tilewright: {error}", file=sys.stderr)
        sys.exit(2)
