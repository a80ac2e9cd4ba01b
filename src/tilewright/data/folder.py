"""A dataset in a folder of images, one sub-folder per class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tilewright.errors import ArgumentError, DataError

_KNOWN = "bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tga tif tiff webp"
EXTENSIONS = frozenset("." + name for name in _KNOWN.split())
MODES = {"rgb": "RGB", "gray": "L"}


def load_image(path: str | os.PathLike, mode: str = "rgb", size: int | tuple[int, int] | None = None, background: int = 255) -> np.ndarray:
    """Read one picture.

    The camera's orientation (EXIF) is applied; transparency is laid over `background`; 16-bit grey is scaled to 8
    bits; of an animation, the first frame is taken.

    Args:
        mode: "rgb" or "gray".
        size: (height, width), or one number for both: the largest centred part of that aspect, resized (bilinear,
            antialiased). None keeps the picture's own size.
        background: 0 (black) to 255 (white).

    Returns:
        (C, H, W) uint8 with C = 3 or 1, a view of (H, W, C) memory.

    Raises:
        DataError: the file is missing, is not an image, or is damaged; the message names it.
    """
    target, box = _options(mode, size, background)
    try:
        with Image.open(path) as image:
            if box is not None:
                # A JPEG decodes to 1/2, 1/4 or 1/8 size for free; twice the target still resizes cleanly.
                image.draft(None, (2 * max(box), 2 * max(box)))  # type: ignore[arg-type]
            picture = _flatten(ImageOps.exif_transpose(image), target, background)
        if box is not None and picture.size != (box[1], box[0]):
            picture = ImageOps.fit(picture, (box[1], box[0]), Image.Resampling.BILINEAR)
        pixels = np.array(picture)
    except FileNotFoundError as e:
        raise DataError(f"{os.fspath(path)}: no such file") from e
    except Exception as e:  # Decoders raise SyntaxError, struct.error, EOFError and more: all mean a bad file.
        raise DataError(f"{os.fspath(path)}: cannot be read as an image ({type(e).__name__}: {e})") from e
    return pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)


def _options(mode: str, size: int | tuple[int, int] | None, background: int) -> tuple[str, tuple[int, int] | None]:
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
    if not 0 <= background <= 255:
        raise ArgumentError(f"background is {background!r}; it must lie in 0 (black) to 255 (white)")
    if size is None:
        return MODES[mode], None
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ArgumentError(f"size is {size!r}; height and width must be at least 1 pixel")
    return MODES[mode], (height, width)


def _flatten(image: Image.Image, target: str, background: int) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if values.size and not 0 <= values.min() <= values.max() <= 65535:
            raise ValueError(f"grey values run from {values.min()} to {values.max()}, beyond 16 bits")
        # 65535 / 255 = 257 exactly, so black and white stay black and white.
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert(target)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save the picture with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        backdrop = Image.new("RGBA", image.size, (background, background, background, 255))
        return Image.alpha_composite(backdrop, image).convert(target)
    if target == "L" and image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")  # Palettes, CMYK, Lab and HSV have a way to RGB, not all one to grey.
    return image.convert(target)


class ImageFolder:
    """Pictures in `root/CLASS/**/*`, labelled by their class folder.

    Class folders and files are taken in sorted order; hidden ones, and files whose extension is not an image's, are
    passed over. Links to class folders are followed.

    Args:
        root: the folder.
        mode, size, background: as for `load_image`. A loader needs pictures of one size, so give `size` unless
            they have one already.
        classes: the class folders' names in label order; None takes all, sorted. Give the training set's to a
            validation set that lacks some.
        on_error: "raise" reports an unreadable picture when it is asked for; "skip" decodes every file once now,
            leaves the unreadable ones out, and warns once with their number.

    Attributes:
        files: list of Path. labels: (N,) int64. classes: list of str.

    Raises:
        DataError: no such folder, no class folders, a class without pictures, or an unreadable picture.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        mode: str = "rgb",
        size: int | tuple[int, int] | None = None,
        classes: Sequence[str] | None = None,
        on_error: str = "raise",
        background: int = 255,
    ):
        _options(mode, size, background)
        if on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
        self.root, self.mode, self.size, self.background = Path(root), mode, size, background
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder")
        found = sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not found:
            raise DataError(f"{self.root}: holds no class folders; put the pictures in {self.root / 'CLASS'}")
        self.classes = found if classes is None else [str(c) for c in classes]
        if unknown := [name for name in found if name not in self.classes]:
            raise DataError(f"{self.root}: folders {unknown} are not among the classes {self.classes}")

        self.files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            pictures = _pictures(self.root / name)
            if not pictures and classes is None:
                raise DataError(
                    f"{self.root / name}: holds no pictures ({', '.join(sorted(EXTENSIONS))}); "
                    "remove the folder, or name the classes with classes=[...]"
                )
            self.files += pictures
            labels += [label] * len(pictures)
        self.labels = np.array(labels, np.int64)
        if on_error == "skip":
            self._drop_unreadable()

    def _drop_unreadable(self) -> None:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            errors = list(pool.map(self._error, self.files))
        bad = [e for e in errors if e]
        if not bad:
            return
        keep = [i for i, e in enumerate(errors) if not e]
        if not keep:
            raise DataError(f"{self.root}: none of its {len(bad)} pictures can be read; the first: {bad[0]}")
        self.files = [self.files[i] for i in keep]
        self.labels = self.labels[keep]
        warnings.warn(
            f"{self.root}: skipped {len(bad)} of {len(errors)} pictures that cannot be read; the first: {bad[0]}",
            stacklevel=3,
        )

    def _error(self, path: Path) -> str | None:
        try:
            load_image(path, self.mode, self.size, self.background)
        except DataError as e:
            return str(e)
        return None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return load_image(self.files[index], self.mode, self.size, self.background), self.labels[index]

    def __repr__(self) -> str:
        return f"ImageFolder({str(self.root)!r}, {len(self)} pictures, {len(self.classes)} classes)"


def _pictures(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [Path(parent, n) for n in names if not n.startswith(".") and Path(n).suffix.lower() in EXTENSIONS]
    return sorted(found)
