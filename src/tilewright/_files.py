"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets

from tilewright.errors import TilewrightError


def write_atomically(path: str, data: bytes, error: type[TilewrightError]) -> None:
    """Replace the file (at a link, the one that it leads to) by `data`, or leave it as it was and raise `error`."""
    place = os.path.realpath(path)
    temporary = f"{place}.{secrets.token_hex(4)}.part"
    try:
        try:
            with open(temporary, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as cause:
        raise error(f"{path}: could not be written ({cause.strerror or cause}); the file is as it was before") from cause
