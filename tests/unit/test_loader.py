"""The loader: order, resuming, threads, errors."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from tilewright.data import ArrayDataset, HorizontalFlip, Loader, Mixup, RandomCrop
from tilewright.errors import ArgumentError, DataError


def dataset(n=50):
    return ArrayDataset(np.arange(n * 12, dtype=np.float32).reshape(n, 3, 2, 2), np.arange(n))


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("tilewright-loader")]


def labels(loader):
    return [y.tolist() for _, y in loader]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_order_depends_on_seed_and_epoch_only(workers):
    def run(w, seed=1):
        loader = Loader(dataset(), 8, shuffle=True, seed=seed, workers=w, transform=RandomCrop(2, padding=1))
        return [[(x.tobytes(), y.tolist()) for x, y in loader] for _ in range(3)]

    mine = run(workers)
    assert mine == run(0)
    assert mine[0] != mine[1]
    assert sorted(label for _, y in mine[0] for label in y) == list(range(50))
    assert mine != run(0, seed=2)


@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_resume_in_mid_epoch(taken):
    a = Loader(dataset(), 8, shuffle=True, seed=1)
    it = iter(a)
    for _ in range(taken):
        next(it)
    state = a.state_dict()
    rest = [y.tolist() for _, y in it]
    b = Loader(dataset(), 8, shuffle=True, seed=1, workers=2)
    b.load_state_dict(state)
    assert labels(b) == rest
    assert labels(b) == labels(a)  # and the epochs after it


def test_state_of_other_data_is_refused():
    state = Loader(dataset(), 8).state_dict()
    with pytest.raises(ArgumentError, match="samples 50 and this loader 10"):
        Loader(dataset(10), 8).load_state_dict(state)


def test_sizes():
    assert [len(y) for _, y in Loader(dataset(10), 4)] == [4, 4, 2]
    assert [len(y) for _, y in Loader(dataset(10), 4, drop_last=True)] == [4, 4]
    assert labels(Loader(dataset(3), 100)) == [[0, 1, 2]]
    assert labels(Loader(dataset(0), 4)) == []


class Bad:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        if i == 6:
            raise OSError("broken.png: truncated")
        return np.zeros((1, 2, 2 + (i == 3)), np.float32), np.int64(i)


def test_errors_name_the_sample():
    with pytest.raises(DataError, match=r"sample 6 could not be read: broken\.png"):
        list(Loader(Bad(), 1, workers=2))
    with pytest.raises(DataError, match="differ in shape"):
        list(Loader(Bad(), 5))
    assert loader_threads() == []


def test_no_thread_outlives_its_epoch():
    for stop in ("break", "close", "drop"):
        it = iter(Loader(dataset(), 2, workers=3))
        next(it)
        if stop == "close":
            it.close()
        del it
        gc.collect()
        for _ in range(100):
            if not loader_threads():
                break
            time.sleep(0.01)
        assert loader_threads() == [], stop
    list(Loader(dataset(), 8, workers=2))
    assert loader_threads() == []


def test_prefetch_is_bounded():
    made = []

    class Slow:
        def __len__(self):
            return 100

        def __getitem__(self, i):
            made.append(i)
            return np.zeros(2), i

    it = iter(Loader(Slow(), 1, workers=2, prefetch=2))
    next(it)
    time.sleep(0.2)
    assert len(made) <= 1 + 2 * 2 + 1
    it.close()


def test_channels_last_is_kept_and_waiting_is_measured():
    x = np.zeros((8, 4, 4, 3), np.uint8).transpose(0, 3, 1, 2)
    loader = Loader(ArrayDataset(x, np.arange(8)), 4, transform=HorizontalFlip())
    for batch, _ in loader:
        assert batch.shape == (4, 3, 4, 4)
        assert batch.transpose(0, 2, 3, 1).flags.c_contiguous
    assert loader.wait_seconds > 0


def test_mixup_gives_probabilities():
    d = ArrayDataset(np.random.default_rng(0).random((8, 1, 2, 2), np.float32), np.arange(8) % 3)
    for _, y in Loader(d, 4, transform=Mixup(3)):
        assert y.shape == (4, 3)
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
