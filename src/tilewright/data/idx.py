"""IDX files, the format of MNIST and its relatives.

The format (LeCun, Cortes and Burges, "The MNIST database of handwritten digits"): two zero bytes, a type code, the
number of dimensions, each dimension as a big-endian 32-bit count, then the values, big-endian, last axis fastest.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from tilewright.data.arrays import ArrayDataset
from tilewright.errors import DataError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CHUNK = 1 << 20


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Read one IDX file, gzipped or not (told by its content, not its name).

    Returns:
        An array of the file's shape and type, in native byte order.

    Raises:
        DataError: the file is missing, has a wrong header, is shorter or longer than the header says, or its gzip
            stream is damaged; the message names the file.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return _parse(raw, path)
            with gzip.GzipFile(fileobj=raw) as stream:
                return _parse(stream, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise DataError(f"{path}: its gzip stream is cut short or damaged ({e}); download it again") from e
    except FileNotFoundError as e:
        raise DataError(f"{path}: no such file") from e
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e})") from e


def _parse(stream, path: Path) -> np.ndarray:
    magic = _read(stream, 4)
    if len(magic) < 4:
        raise DataError(f"{path}: is {len(magic)} bytes long; an IDX file begins with a 4-byte magic number")
    if magic[:2] != b"\0\0" or magic[2] not in TYPES or magic[3] == 0:
        raise DataError(
            f"{path}: begins with {magic.hex(' ')}; an IDX file begins with 00 00, a type "
            f"({', '.join(f'{t:02x}' for t in TYPES)}) and the number of dimensions"
        )
    dims = magic[3]
    header = _read(stream, 4 * dims)
    if len(header) < 4 * dims:
        raise DataError(f"{path}: ends within its header of {dims} dimensions; it was cut short")
    shape = struct.unpack(f">{dims}I", header)
    dtype = np.dtype(TYPES[magic[2]])
    expected = math.prod(shape) * dtype.itemsize
    # One byte more than due is asked for, so that trailing bytes show, and a gzip stream reaches its checksum.
    values = _read(stream, expected + 1)
    if len(values) != expected:
        what = "ends after" if len(values) < expected else "goes on beyond"
        had = len(values) if len(values) < expected else expected
        raise DataError(f"{path}: {what} {had} bytes of values; shape {shape} of {dtype.name} is {expected} bytes")
    return np.frombuffer(values, dtype).astype(dtype.newbyteorder("="), copy=False).reshape(shape)


def _read(stream, count: int) -> bytearray:
    # In pieces: a damaged header may promise exabytes, and the memory must follow what is there.
    data = bytearray()
    while len(data) < count and (piece := stream.read(min(CHUNK, count - len(data)))):
        data += piece
    return data


def mnist_files(folder: str | os.PathLike) -> tuple[ArrayDataset, ArrayDataset]:
    """MNIST, or a data set in its format (Fashion-MNIST, KMNIST), from its four files.

    `folder` holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte`, each possibly with `.gz`, or with a dot in place of the last-but-one dash.

    Returns:
        (train, test), each of x (N, 1, H, W) uint8 and y (N,) int64 in 0..9.

    Raises:
        DataError: a file is missing, damaged, of the wrong shape, or does not fit its companion.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return _pair(folder, "train"), _pair(folder, "t10k")


def _pair(folder: Path, part: str) -> ArrayDataset:
    image_file, label_file = _find(folder, f"{part}-images", "idx3"), _find(folder, f"{part}-labels", "idx1")
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise DataError(f"{image_file}: holds {images.dtype.name} of shape {images.shape}, not uint8 (N, H, W)")
    if labels.ndim != 1 or labels.dtype != np.uint8:
        raise DataError(f"{label_file}: holds {labels.dtype.name} of shape {labels.shape}, not uint8 (N,)")
    if len(labels) != len(images):
        raise DataError(f"{label_file}: holds {len(labels)} labels for the {len(images)} images of {image_file.name}")
    if labels.size and labels.max() > 9:
        raise DataError(f"{label_file}: holds label {labels.max()}; labels are 0 to 9")
    return ArrayDataset(images[:, None], labels, classes=[str(i) for i in range(10)])


def _find(folder: Path, stem: str, kind: str) -> Path:
    names = [f"{stem}{sep}{kind}-ubyte{gz}" for sep in "-." for gz in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: holds none of {', '.join(names)}")
