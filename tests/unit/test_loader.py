"""The loader: order, resuming, threads, errors."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from tilewright.data import ArrayDataset, BatchRandom, HorizontalFlip, Loader, Mixup, RandomCrop, as_batches
from tilewright.errors import ArgumentError, DataError, ShapeError


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
    with pytest.raises(DataError, match=r"sample 6 could not be read: OSError: broken\.png"):
        list(Loader(Bad(), 1, workers=2))
    with pytest.raises(DataError, match=r"sample 3 has x shape \(1, 2, 3\), sample 0 has \(1, 2, 2\)"):
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


# -- epochs and states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_left_early_loses_nothing_for_the_next(workers):
    loader = Loader(dataset(), 8, shuffle=True, workers=workers)
    next(iter(loader))
    assert loader.state_dict()["position"] == 1
    second = labels(loader)
    assert sorted(label for batch in second for label in batch) == list(range(50))
    loader.set_epoch(1)
    assert labels(loader) == second
    assert loader.epoch == 2


def test_set_epoch_keeps_a_loaded_position_and_restarts_a_begun_epoch():
    a = Loader(dataset(), 8, shuffle=True, seed=4)
    a.set_epoch(3)
    whole = labels(a)
    a.set_epoch(3)
    it = iter(a)
    next(it), next(it)
    state = a.state_dict()
    a.set_epoch(3)
    assert labels(a) == whole
    b = Loader(dataset(), 8, shuffle=True)  # another seed: the state brings its own
    b.load_state_dict(state)
    b.set_epoch(3)
    assert labels(b) == whole[2:]
    b.load_state_dict(state)
    b.set_epoch(5)
    assert len(labels(b)) == 7


def test_an_older_loop_does_not_move_the_state():
    loader = Loader(dataset(), 8)
    old, new = iter(loader), iter(loader)
    next(new)
    state = loader.state_dict()
    for _ in old:
        pass
    assert loader.state_dict() == state


def test_a_closed_loop_stays_where_it_was():
    loader = Loader(dataset(), 8, workers=2)
    it = iter(loader)
    next(it)
    it.close()  # type: ignore[attr-defined]
    assert list(it) == []
    assert (loader.epoch, loader.state_dict()["position"]) == (0, 1)


def test_a_bad_state_changes_nothing():
    loader = Loader(dataset(), 8)
    state = loader.state_dict()
    for bad in ({**state, "position": 8}, {**state, "epoch": -1}, {**state, "seed": 1.5}, {"seed": 0}, {**state, "shuffle": 1}):
        with pytest.raises(ArgumentError):
            loader.load_state_dict(bad)
        assert loader.state_dict() == state


def test_transforms_do_not_depend_on_batch_size_or_order():
    x = np.random.default_rng(0).random((24, 1, 6, 6), np.float32)

    def by_label(**options):
        loader = Loader(ArrayDataset(x, np.arange(24)), transform=RandomCrop(6, padding=2), seed=3, **options)
        return {label: image.tobytes() for xs, ys in loader for image, label in zip(xs, ys.tolist(), strict=True)}

    assert by_label(batch_size=5) == by_label(batch_size=24, shuffle=True, workers=3)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_list_of_samples_is_a_dataset():
    samples = [(np.full((2, 3), i, np.float32), i) for i in range(5)]
    (x, y), *rest = Loader(samples, 4)
    assert x.shape == (4, 2, 3)
    assert y.dtype == np.int64
    assert len(rest) == 1
    (alone,) = Loader([s[0] for s in samples], 8, transform=lambda x, y, random: (x + 1, y))
    np.testing.assert_array_equal(alone[:, 0, 0], np.arange(5) + 1)
    ((_, y),) = Loader([(s[0], 0.5) for s in samples], 8)
    assert y.dtype == np.float32


def test_channels_last_samples_make_channels_last_batches():
    pictures = [(np.random.default_rng(i).integers(0, 255, (4, 5, 3), np.uint8), i) for i in range(3)]
    ((x, _),) = Loader([(p.transpose(2, 0, 1), y) for p, y in pictures], 3)
    assert x.shape == (3, 3, 4, 5)
    assert x.transpose(0, 2, 3, 1).flags.c_contiguous
    np.testing.assert_array_equal(x[2], pictures[2][0].transpose(2, 0, 1))


@pytest.mark.parametrize("samples", [[(np.zeros(2), 0), np.zeros(2)], [(np.zeros(2), 0, 1)], [("a", 0)], [(None, 0)]])
def test_samples_that_are_no_samples(samples):
    with pytest.raises(DataError, match=r"sample [01] has"):
        list(Loader(samples, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 2.5},
        {"seed": -1},
        {"workers": -1},
        {"prefetch": 0},
        {"batch_size": 51, "drop_last": True},
    ],
)
def test_bad_options(options):
    with pytest.raises(ArgumentError):
        Loader(dataset(), **options)


def test_a_generator_is_no_dataset():
    with pytest.raises(ArgumentError, match="lacks __len__"):
        Loader((i for i in range(3)), 2)  # type: ignore[arg-type]


# -- errors and threads ------------------------------------------------------------------------------------------------


class Failing:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 25:
            raise self.error
        return np.zeros((1, 2, 2), np.float32), i


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyError("k"), StopIteration(), ZeroDivisionError("z")])
def test_a_failing_sample_is_named_after_the_batches_before_it(workers, error):
    loader = Loader(Failing(error), 4, workers=workers)
    seen = []
    with pytest.raises(DataError, match=f"sample 25 could not be read: {type(error).__name__}") as caught:
        for _, y in loader:
            seen.append(y)
    assert len(seen) == 6
    assert caught.value.__cause__ is error
    assert loader_threads() == []
    assert loader.state_dict()["position"] == 6


def test_a_failing_transform_names_the_batch():
    def wrong(x, y, random):
        return x / y[:, None], y[99]

    with pytest.raises(DataError, match=r"wrong.* failed on batch 0 of epoch 0 \(samples 0, 1, 2\)"):
        list(Loader(dataset(), 3, transform=wrong))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_loop_ends_the_threads(error):
    def consume():
        for _ in Loader(dataset(), 2, workers=3):
            raise error

    with pytest.raises(error):
        consume()
    gc.collect()
    assert loader_threads() == []


def test_ctrl_c_while_waiting_ends_the_threads():
    class Interrupting(Failing):
        def __getitem__(self, i):
            if i == 0:
                time.sleep(0.05)
                raise KeyboardInterrupt
            return super().__getitem__(i)

    loader = Loader(Interrupting(ValueError()), 1, workers=2)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    gc.collect()
    assert loader_threads() == []


def test_a_loop_caught_in_a_cycle_is_collected():
    class Node:
        pass

    node = Node()
    node.it, node.self = iter(Loader(dataset(), 2, workers=2)), node
    next(node.it)
    del node
    gc.collect()
    assert loader_threads() == []


def test_a_program_that_ends_in_mid_epoch_does_not_hang():
    code = """
        import time
        import numpy as np
        from tilewright.data import Loader

        class Slow:
            def __len__(self):
                return 10_000
            def __getitem__(self, i):
                time.sleep(0.02)
                return np.zeros(3), i

        it = iter(Loader(Slow(), 500, workers=2, prefetch=4))
        time.sleep(0.1)
    """
    # Eight batches of ten seconds each are queued when the program ends.
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=20)


def test_the_dataset_is_freed_with_its_loader():
    import weakref

    data = Failing(ValueError())
    gone = weakref.ref(data)
    loader = Loader(data, 4, workers=2)
    with pytest.raises(DataError):
        list(loader)
    del loader, data
    gc.collect()
    assert gone() is None


# -- any iterable of batches -------------------------------------------------------------------------------------------


def pairs(n=4):
    return [(np.full((2, 3), i, np.float32), np.full(2, i)) for i in range(n)]


def test_as_batches_passes_loaders_and_arrays_on():
    loader = Loader(dataset(), 8)
    assert as_batches(loader) is loader
    source = pairs()
    batches = as_batches(source)
    assert len(batches) == 4
    assert all(x is a and y is b for (x, y), (a, b) in zip(batches, source, strict=True))
    ((x, y),) = as_batches([[[[1.0, 2.0]], [3]]])
    assert (x.dtype, y.dtype) == (np.float32, np.int64)


def test_as_batches_resumes():
    a = as_batches(pairs())
    it = iter(a)
    next(it), next(it)
    b = as_batches(pairs())
    b.load_state_dict(a.state_dict())
    b.set_epoch(0)
    assert [int(y[0]) for _, y in b] == [2, 3]
    assert [int(y[0]) for _, y in b] == [0, 1, 2, 3]
    assert b.state_dict() == {"epoch": 2, "position": 0}


def test_a_generator_serves_once_and_a_function_always():
    once = as_batches(b for b in pairs())
    assert len(list(once)) == 4
    with pytest.raises(DataError, match="only once"):
        list(once)
    always = as_batches(lambda: (b for b in pairs()))
    assert [len(list(always)) for _ in range(2)] == [4, 4]


def test_as_batches_hands_the_epoch_on():
    class Source(list):
        def set_epoch(self, epoch):
            self.epoch = epoch

    source = Source(pairs())
    batches = as_batches(source)
    batches.set_epoch(7)
    list(batches)
    assert source.epoch == 7


def test_batches_that_are_no_batches():
    with pytest.raises(ArgumentError, match="one pair of arrays"):
        as_batches((np.zeros((4, 3)), np.zeros(4)))
    with pytest.raises(ArgumentError, match="got int"):
        as_batches(3)  # type: ignore[arg-type]
    for bad, words in (
        ([np.zeros((2, 2))], "must be"),
        ([(np.zeros(2),)], "1 parts"),
        ([([[1], [2, 3]], [0, 1])], "ragged"),
        ([(["a"], [0])], "not a number"),
    ):
        with pytest.raises(DataError, match=words):
            list(as_batches(bad))
    with pytest.raises(ShapeError, match="one entry per sample"):
        list(as_batches([(np.zeros((2, 2)), np.zeros(3))]))


def test_streams_are_independent():
    a, b = BatchRandom(0, 0, [5, 6]), BatchRandom(0, 0, [6, 7, 5])
    u, v = a.uniform(3), b.uniform(3)
    np.testing.assert_array_equal(u[0], v[2])
    np.testing.assert_array_equal(u[1], v[0])
    for other in (BatchRandom(1, 0, [5]), BatchRandom(0, 1, [5]), BatchRandom(0, 0, [7])):
        assert not np.intersect1d(u[0], other.uniform(3)).size
    assert not np.array_equal(u, a.uniform(3))
