"""A candidate that is wrong, strays, hangs or crashes never wins, and is recorded as what it is; nothing else is lost."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from tilewright import devices
from tilewright.devices import api
from tilewright.devices.api import CHANNELS_LAST, Problem, registered, spec
from tilewright.dtypes import uint8
from tilewright.errors import KernelError
from tilewright.ops._op import OPS, Arg, find, wide
from tilewright.ops.conv2d import Conv2dAttrs, InputGradAttrs, WeightGradAttrs
from tilewright.ops.matmul import LinearAttrs, MatmulAttrs
from tilewright.tune import check as checking
from tilewright.tune.bench import rank
from tilewright.tune.check import Material, check, positions
from tilewright.tune.worker import Worker, trials

CPU = devices.get("cpu")

# A right kernel for each of two ops, spoilt in a way that its name tells. In a module of its own, so that a worker finds it.
PLANTED = """
import ctypes
import os
import signal
import time

import numpy as np

from tilewright.devices.api import Kernel, register, registered
from tilewright.errors import OutOfMemory


def negate(problem, inputs, outputs):
    a = outputs[0].array(problem.outputs[0])
    np.negative(a, out=a)


def add_a_thousandth(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[...] += 1e-3


def give_nan(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[1, 3, 4, 5] = np.nan


def overflow_once(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[0, 1, 2, 3] = np.inf


def write_before(problem, inputs, outputs):
    ctypes.memset(outputs[0].ptr - 4, 1, 4)


def write_after(problem, inputs, outputs):
    ctypes.memset(outputs[0].ptr + problem.outputs[0].nbytes, 1, 64)


def write_its_input(problem, inputs, outputs):
    inputs[0].raw[5] ^= 1


def write_beside_its_input(problem, inputs, outputs):
    ctypes.memset(inputs[1].ptr - 1, 0, 1)


def leave_some_unwritten(problem, inputs, outputs):
    outputs[0].raw[40:48] = FILL[0]


def wrong_in_the_last_row(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[:, :, -1] *= 1.5


def wrong_in_the_first_column(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[:, :, :, 0] = 0


def wrong_in_the_last_channel(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[:, -1] += 1


def wrong_at_odd_sizes(problem, inputs, outputs):
    if problem.outputs[0].shape[-1] % 2:
        outputs[0].array(problem.outputs[0])[...] *= 2


def differ_each_time(problem, inputs, outputs):
    a = outputs[0].array(problem.outputs[0])
    a[0, 0, 0, 0] *= np.float32(1 + 1e-7 * (next(turns) % 2))


def raise_an_error(problem, inputs, outputs):
    raise ValueError("no such tile")


def run_out_of_memory(problem, inputs, outputs):
    raise OutOfMemory("cpu: 123 bytes could not be allocated")


def hang(problem, inputs, outputs):
    time.sleep(3600)


def hang_with_the_lock(problem, inputs, outputs):
    ctypes.PyDLL(None).sleep(3600)


def crash(problem, inputs, outputs):
    ctypes.memset(8, 0, 1)


def abort(problem, inputs, outputs):
    os.abort()


def be_killed(problem, inputs, outputs):
    os.kill(os.getpid(), signal.SIGKILL)


def leave(problem, inputs, outputs):
    os._exit(3)


def crash_later(problem, inputs, outputs):
    if next(turns) > 4:
        ctypes.memset(8, 0, 1)


def talk(problem, inputs, outputs):
    print("nothing but noise", flush=True)


def nothing(problem, inputs, outputs):
    pass


import itertools

FILL = [0]
turns = itertools.count()


class Planted(Kernel):
    device = "cpu"
    rank = 1

    def __init__(self, op, spoil):
        self.op, self.spoil = op, spoil
        self.id = f"cpu.{op}.{spoil.__name__}"
        self.good = next(k for k in registered("cpu", op) if "onednn" not in k.id and type(k) is not Planted)

    def prepare(self, problem, config, device):
        launch = self.good.prepare(problem, config, device)

        def run(inputs, outputs):
            fill = outputs[0].raw[0]
            launch(inputs, outputs)
            FILL[0] = fill
            self.spoil(problem, inputs, outputs)

        return run


ways = [v for v in list(globals().values()) if getattr(v, "__module__", None) == __name__ and v is not Planted]
for op in ("conv2d", "matmul", "greater"):
    for way in ways:
        register(Planted(op, way))
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Kernels by (op, name), in the registry for as long as the test runs."""
    (tmp_path / "planted_kernels.py").write_text(textwrap.dedent(PLANTED))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {key: list(ks) for key, ks in api._kernels.items()}
    try:
        __import__("planted_kernels")
        yield {(k.op, k.id.split(".")[-1]): k for k in registered("cpu") if type(k).__module__ == "planted_kernels"}
    finally:
        sys.modules.pop("planted_kernels", None)
        api._kernels.clear()
        api._kernels.update(before)


def conv(n=2, c=6, size=9, f=8, **attrs):
    x, w = spec((n, c, size, size), "float32", CHANNELS_LAST), spec((f, c, 3, 3), "float32", CHANNELS_LAST)
    a = Conv2dAttrs(padding=(1, 1, 1, 1), **attrs)
    return Problem("conv2d", a, (x, w, None, None), OPS["conv2d"].outputs(a, x, w, None, None))


def product(m=33, k=20, n=17):
    x, y = spec((m, k), "float32"), spec((k, n), "float32")
    return Problem("matmul", MatmulAttrs(), (x, y), (spec((m, n), "float32"),))


def run(kernel, problem, material=None, **options):
    material = Material(find(problem.op), problem) if material is None else material
    return check(problem, CPU, kernel, (), kernel.prepare(problem, (), CPU), material, **options)


def all_right(problem, material):
    """Every config of every kernel that takes the problem passes; how many there are."""
    seen = 0
    for kernel in CPU.kernels(problem.op):
        for config in [] if kernel.reject(problem, CPU) else kernel.configs(problem, CPU):
            result = check(problem, CPU, kernel, config, kernel.prepare(problem, config, CPU), material)
            assert result.status == "ok", (kernel.id, config, problem, result)
            seen += 1
    return seen


def good(op):
    return next(k for k in registered("cpu", op) if "onednn" not in k.id and type(k).__module__ != "planted_kernels")


# -- the sampled references --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.reference_at is not None])
def test_sampled_reference_is_the_reference(name):
    op = OPS[name]
    for sample in op.samples():
        values = [None if a is None else a.array(np.random.default_rng(0)) for a in sample.inputs]
        whole = op.reference(sample.attrs, *[None if v is None else wide(v) for v in values])
        for k, want in enumerate(whole if isinstance(whole, tuple) else (whole,)):
            everywhere = np.array(list(np.ndindex(*want.shape)), np.int64).reshape(-1, want.ndim)
            got = op.reference_at(sample.attrs, values, k, everywhere)
            if want.dtype.kind in "iu":
                np.testing.assert_array_equal(got, want.reshape(-1))
            else:
                np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-11, atol=1e-11, err_msg=sample.note)


def test_the_costly_ops_have_one():
    assert {n for n, op in OPS.items() if op.reference_at is not None} == {
        "conv2d",
        "conv2d_input_grad",
        "conv2d_weight_grad",
        "linear",
        "matmul",
    }


def test_places_hold_every_corner_and_face():
    places = positions((5, 64, 7, 9), np.random.default_rng(0), 40)
    assert len(np.unique(places, axis=0)) == len(places) <= 40 + 16 + 16
    at = {tuple(p) for p in places.tolist()}
    assert {(n, c, i, j) for n in (0, 4) for c in (0, 63) for i in (0, 6) for j in (0, 8)} <= at
    for axis, size in enumerate((5, 64, 7, 9)):
        for end in (0, size - 1):
            others = [p for p in at if p[axis] == end and any(q not in (0, s - 1) for q, s in zip(p, (5, 64, 7, 9), strict=True))]
            assert others, (axis, end)
    assert len(positions((3, 4), np.random.default_rng(0), 40)) == 12
    assert positions((3, 0), np.random.default_rng(0), 40).shape == (0, 2)
    assert positions((), np.random.default_rng(0), 40).shape == (1, 0)


# -- operands ----------------------------------------------------------------------------------------------------------


def test_every_kernel_passes_on_its_samples():
    """What the contract tests admit, the check admits: on every sample of every op, drawn anew."""
    seen = 0
    for name, op in OPS.items():
        for sample in op.samples():
            lies = [None if a is None else a.spec for a in sample.inputs]
            problem = Problem(name, sample.attrs, tuple(lies), op.outputs(sample.attrs, *lies))
            seen += all_right(problem, Material(op, problem))
    assert seen > 1000


def test_operands_keep_to_what_the_samples_say():
    """At sizes no sample has: indices within range, positive variances, the taps that a pooling window has."""
    from tilewright.ops.loss import CrossEntropyAttrs
    from tilewright.ops.norm import MaskedAttrs
    from tilewright.ops.pool2d import PoolAttrs, PoolGradAttrs

    big = spec((4, 32, 28, 28), "float32", CHANNELS_LAST)
    pool = PoolAttrs((3, 3), (2, 2), (1, 1, 1, 1))
    small = spec((4, 32, 14, 14), "float32", CHANNELS_LAST)
    small_pool = PoolAttrs((2, 2), (2, 2), (1, 1, 1, 1))  # none of whose taps lies inside for every output
    odd = spec((4, 32, 15, 15), "float32", CHANNELS_LAST)
    wide_pool = PoolAttrs((4, 4), (2, 2), (1, 1, 1, 1))  # no sample has this window
    channels = spec((32,), "float32")
    for name, attrs, inputs in (
        ("cross_entropy", CrossEntropyAttrs(), (spec((64, 1000), "float32"), spec((64,), "int64"), None)),
        ("take", 0, (spec((500, 8), "float32"), spec((40,), "int64"))),
        ("take", 0, (spec((2, 8), "float32"), spec((40,), "int64"))),  # shorter than any sample's: only index 0 is left
        ("max_pool2d", pool, (big,)),
        ("max_pool2d_grad", PoolGradAttrs(pool, (28, 28)), (small, small.like(dtype=uint8))),
        ("max_pool2d_grad", PoolGradAttrs(wide_pool, (28, 28)), (small, small.like(dtype=uint8))),
        ("max_pool2d_grad", PoolGradAttrs(small_pool, (28, 28)), (odd, odd.like(dtype=uint8))),
        ("max_pool2d_pick", wide_pool, (big, small.like(dtype=uint8))),
        ("batch_norm_train", MaskedAttrs(1e-5, "relu", CHANNELS_LAST), (big, channels, channels)),
        ("log", None, (big,)),
        ("greater", None, (big, big)),
        ("conv2d", Conv2dAttrs(), (spec((1, 8, 20, 20), "bfloat16", CHANNELS_LAST), spec((8, 8, 3, 3), "bfloat16", CHANNELS_LAST), None, None)),
    ):
        op = OPS[name]
        problem = Problem(name, attrs, inputs, op.outputs(attrs, *inputs))
        assert all_right(problem, Material(op, problem)) > 0


def test_operands_are_the_seeds_and_large_ones_repeat_a_stretch():
    problem = product(3, 700000, 2)
    one, two, other = (Material(find("matmul"), problem, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one.values, two.values, strict=True))
    assert not np.array_equal(one.values[0], other.values[0])
    flat = one.values[0].reshape(-1)
    assert np.array_equal(flat[: flat.size - checking.STRETCH], flat[checking.STRETCH :])


def test_an_op_without_fitting_operands_says_so():
    class Op:
        name, terms, reference_at, operands = "picky", None, None, None
        samples = staticmethod(lambda: [type("Sample", (), {"inputs": (Arg((2,)),), "attrs": None})])

        @staticmethod
        def reference(attrs, x):
            raise ValueError("never content")

    problem = Problem("picky", None, (spec((3,), "float32"),), (spec((3,), "float32"),))
    with pytest.raises(KernelError, match=r"no random operands for picky.* could be made: never content"):
        Material(Op, problem)


# -- planted candidates ------------------------------------------------------------------------------------------------

WRONG = {
    "negate": "from the reference",
    "add_a_thousandth": "from the reference",
    "give_nan": "output 0 is nan at (1, 3, 4, 5)",
    "write_before": "it wrote before the start of output 0",
    "write_after": "it wrote past the end of output 0",
    "write_its_input": "it changed input 0",
    "write_beside_its_input": "it wrote beside input 1",
    "leave_some_unwritten": "it left 2 of the 1296 elements of output 0 unwritten",
    "overflow_once": "output 0 is inf at (0, 1, 2, 3)",
    "wrong_in_the_last_row": "from the reference",
    "wrong_in_the_first_column": "from the reference",
    "wrong_in_the_last_channel": "from the reference",
    "differ_each_time": "two launches differ",
}


@pytest.mark.parametrize(("name", "reason"), WRONG.items())
def test_a_wrong_candidate_is_found(planted, name, reason):
    problem = conv()
    material = Material(find("conv2d"), problem)
    result = run(planted["conv2d", name], problem, material)
    assert (result.status, reason in result.reason) == ("wrong", True), result
    assert run(good("conv2d"), problem, material) == ("ok", "", pytest.approx(0, abs=60))  # the next finds its operands whole


@pytest.mark.parametrize(
    "name", ["wrong_in_the_last_row", "wrong_in_the_first_column", "wrong_in_the_last_channel", "negate", "leave_some_unwritten"]
)
def test_it_is_found_on_a_large_problem(planted, name):
    """Where the reference is taken at some places only, and the candidate launched once."""
    problem = conv(4, 16, 96, 64)
    assert problem.outputs[0].nbytes > checking.AGAIN
    assert run(planted["conv2d", name], problem).status == "wrong"


def test_wrong_at_some_sizes_only(planted):
    kernel = planted["conv2d", "wrong_at_odd_sizes"]
    assert [run(kernel, conv(size=size)).status for size in (8, 9)] == ["ok", "wrong"]


def test_bools_left_unwritten_are_found(planted):
    x = spec((64, 8), "float32")
    problem = Problem("greater", None, (x, x), (spec((64, 8), "bool"),))
    assert run(good("greater"), problem).status == "ok"
    result = run(planted["greater", "leave_some_unwritten"], problem)
    assert (result.status, result.reason) == ("wrong", "it left 8 of the 512 elements of output 0 unwritten")


def test_a_candidate_that_raises(planted):
    assert run(planted["conv2d", "raise_an_error"], conv())[:2] == ("failed", "it raised ValueError: no such tile")
    assert run(planted["conv2d", "run_out_of_memory"], conv())[:2] == ("over-limit", "cpu: 123 bytes could not be allocated")


def test_weight_gradient_is_checked_too():
    x, g = spec((3, 8, 12, 12), "float32", CHANNELS_LAST), spec((3, 16, 12, 12), "float32", CHANNELS_LAST)
    attrs = WeightGradAttrs(Conv2dAttrs(padding=(1, 1, 1, 1)), (3, 3), True)
    problem = Problem("conv2d_weight_grad", attrs, (x, g), OPS["conv2d_weight_grad"].outputs(attrs, x, g))
    kernel = good("conv2d_weight_grad")
    right = kernel.prepare(problem, (), CPU)

    def without_bias(inputs, outputs):
        right(inputs, outputs)
        outputs[1].array(problem.outputs[1])[...] = 0

    material = Material(find(problem.op), problem)
    assert check(problem, CPU, kernel, (), right, material).status == "ok"
    result = check(problem, CPU, kernel, (), without_bias, material)
    assert result.status == "wrong"
    assert result.reason.startswith("output 1 is")


# -- in a process of its own -------------------------------------------------------------------------------------------


def test_problems_travel(planted):
    """Specs are interned: what arrives is the very object."""
    for problem in (
        conv(activation="relu"),
        product(),
        Problem("linear", LinearAttrs("relu"), (spec((2, 3), "bfloat16"),) * 2 + (None,), (spec((2, 2), "bfloat16"),)),
        Problem("conv2d_input_grad", InputGradAttrs(Conv2dAttrs(), (4, 4)), conv().inputs[:2], conv().outputs),
    ):
        _ = problem.empty
        back = pickle.loads(pickle.dumps(problem))
        assert back == problem
        assert hash(back) == hash(problem)
        assert all(a is b for a, b in zip(back.inputs + back.outputs, problem.inputs + problem.outputs, strict=True))
        assert type(back.attrs) is type(problem.attrs)
    assert pickle.loads(pickle.dumps(find)) is find


def test_no_bad_candidate_wins_and_each_is_recorded(planted):
    problem = conv()
    expected = {
        "hang": ("timeout", "it made no progress for 2 s"),
        "crash": ("failed", "its process died of SIGSEGV"),
        "negate": ("wrong", "from the reference"),
        "write_after": ("wrong", "it wrote past the end of output 0"),
        "be_killed": ("failed", "its process died of SIGKILL"),
        "raise_an_error": ("failed", "it raised ValueError: no such tile"),
        "leave": ("failed", "its process ended with code 3"),
        "talk": ("ok", ""),
        "wrong_at_odd_sizes": ("wrong", "from the reference"),
        "abort": ("failed", "its process died of SIGABRT"),
        "hang_with_the_lock": ("timeout", "it made no progress for 2 s"),
        "crash_later": ("failed", "its process died of SIGSEGV"),
        "write_its_input": ("wrong", "it changed input 0"),
        "wrong_in_the_last_row": ("wrong", "from the reference"),
        "nothing": ("ok", ""),
    }
    candidates = [(planted["conv2d", name], ()) for name in expected] + [(good("conv2d"), ())]
    with Worker(CPU, find, timeout_s=2) as worker:
        found = list(worker.measure(problem, candidates, budget_s=3))
        assert worker.starts == 8 + 1  # one, and another after each that hung, died or strayed
        again = list(worker.measure(product(), [(k, ()) for k in (good("matmul"), planted["matmul", "negate"])], budget_s=1))
        assert sorted(t.status for t in again) == ["ok", "wrong"]
    assert sorted(t.kernel for t in found) == sorted(k.id for k, _ in candidates)
    for trial in found:
        status, reason = expected.get(trial.kernel.split(".")[-1], ("ok", ""))
        assert (trial.status, reason in trial.reason) == (status, True), trial
        assert (trial.median is not None and trial.median > 0 and trial.count > 0) == (status == "ok")
    assert set(rank({t.kernel: t for t in found})) == {good("conv2d").id, "cpu.conv2d.talk", "cpu.conv2d.nothing"}


def test_what_is_finished_arrives_before_a_hang(planted):
    candidates = [(planted["conv2d", n], ()) for n in ("negate", "hang")] + [(good("conv2d"), ())]
    with Worker(CPU, find, timeout_s=1.5) as worker:
        answers = worker.measure(conv(), candidates)
        assert next(answers).status == "wrong"
        assert worker.starts == 1
        assert [t.status for t in answers] == ["timeout", "ok"]


def test_a_measurement_left_half_way_does_not_answer_the_next(planted):
    with Worker(CPU, find, timeout_s=20) as worker:
        answers = worker.measure(conv(), [(planted["conv2d", "negate"], ()), (good("conv2d"), ())])
        assert next(answers).status == "wrong"
        answers.close()
        found = list(worker.measure(product(), [(good("matmul"), ())]))
        assert [(t.kernel, t.status) for t in found] == [(good("matmul").id, "ok")]


def test_a_worker_that_was_killed_between_problems_is_replaced():
    with Worker(CPU, find) as worker:
        assert [t.status for t in worker.measure(product(), [(good("matmul"), ())])] == ["ok"]
        worker._process.kill()
        worker._process.wait()
        assert [t.status for t in worker.measure(product(), [(good("matmul"), ())])] == ["ok"]
        assert worker.starts == 2


def missing_op(name):
    raise SystemExit(7)  # stands for a process that cannot even begin


def test_a_worker_that_dies_with_no_candidate_running(planted):
    with Worker(CPU, missing_op) as worker:
        found = list(worker.measure(product(), [(good("matmul"), ()), (planted["matmul", "nothing"], ())]))
    assert [t.status for t in found] == ["failed", "failed"]
    assert all("ended with code 7 while no candidate ran" in t.reason for t in found)


ORPHAN = """
import threading, time
from tilewright import devices
from tilewright.devices.api import registered
from tilewright.ops._op import find
from tilewright.tune.worker import Worker
from tests.unit.test_tune_check import product

def tell():
    while worker._process is None:
        time.sleep(0.01)
    print(worker._process.pid, flush=True)

cpu = devices.get("cpu")
import planted_kernels
kernel = next(k for k in registered("cpu", "matmul") if k.id.endswith(".hang"))
with Worker(cpu, find, timeout_s=3600) as worker:
    threading.Thread(target=tell).start()
    list(worker.measure(product(), [(kernel, ())]))
"""


def test_a_worker_ends_with_its_parent(planted, tmp_path):
    """Though it hangs in a candidate, and the parent is killed and can end nobody."""
    path = os.pathsep.join([str(tmp_path), *map(os.path.abspath, sys.path)])
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.0)
        assert worker.is_running()
        parent.kill()
    for _ in range(200):
        if not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    worker.kill()
    pytest.fail("the worker goes on without its parent")


def test_limits_and_budget_in_this_process(planted):
    problem = product()
    kernel = good("matmul")

    class Hungry(type(kernel)):
        def __init__(self):
            self.__dict__.update(kernel.__dict__)

        def workspace(self, problem, config):
            return 1000

    material = Material(find("matmul"), problem)
    found, launches = trials(problem, CPU, [(Hungry(), ()), (kernel, ())], material, workspace=999)
    assert [(t.status, t.reason) for t in found] == [("over-limit", "it needs 1000 bytes of workspace and 999 are allowed"), ("ok", "")]
    assert list(launches) == [1]

    now = [0.0]

    def clock():  # every look costs a tenth of the budget
        now[0] += 0.1
        return now[0]

    many = [(kernel, ())] * 3 + [(planted["matmul", "negate"], ())] + [(kernel, ())] * 40
    found, _ = trials(problem, CPU, many, material, budget_s=1.0, clock=clock)
    assert len(found) == len(many)
    assert found[0].status == "ok"
    assert found[0].count == 1
    assert found[-1].status == "skipped"
    assert found[-1].reason == "the 1 s allowed were spent before its turn"


# -- large problems ----------------------------------------------------------------------------------------------------


def test_which_ops_treat_each_image_by_itself():
    """Pointwise ops and pooling do; whatever sums, sorts or moves along the first axis, or can, does not."""
    by_image = {n for n, op in OPS.items() if checking._by_image(op)}
    assert {"relu", "add", "where", "gelu_grad", "max_pool2d", "max_pool2d_grad", "avg_pool2d", "batch_norm_infer", "resize2d"} <= by_image
    others = {"batch_norm_train", "batch_norm_grad", "softmax", "sum", "permute", "take", "gather", "index_add", "cumsum", "topk", "pad", "matmul"}
    assert not others & by_image


def test_of_a_large_batch_three_images_are_compared():
    x = spec((9, 16, 40, 40), "float32", CHANNELS_LAST)
    attrs = (0.0, 0.0)
    problem = Problem("tanh", attrs, (x,), OPS["tanh"].outputs(attrs, x))
    material = Material(find("tanh"), problem)
    (expected,) = material.expected
    assert {0, 8} < set(expected.at[0].tolist())
    assert len(set(expected.at[0].tolist())) == 3
    np.testing.assert_allclose(expected.values, np.tanh(material.values[0].astype(np.float64))[expected.at], rtol=1e-12)
    kernel = good("tanh")
    assert run(kernel, problem, material).status == "ok"
    right = kernel.prepare(problem, (), CPU)

    def with_edge(inputs, outputs):
        right(inputs, outputs)
        outputs[0].array(x)[..., -1] *= 1.01

    def without_one(inputs, outputs):
        right(inputs, outputs)
        outputs[0].array(x)[4, 7, 20, 20] = np.nan  # in an image, most likely, that is not compared

    assert check(problem, CPU, kernel, (), with_edge, material).status == "wrong"
    assert check(problem, CPU, kernel, (), without_one, material).reason == "output 0 is nan at (4, 7, 20, 20)"


def test_bits_decided_within_rounding_may_differ_but_no_more():
    """The mask of a fused relu comes from sums in float32, and here and there lies on the other side of 0."""
    from tilewright.ops.norm import MaskedAttrs

    x, c = spec((2, 32, 24, 24), "float32", CHANNELS_LAST), spec((32,), "float32")
    attrs = MaskedAttrs(1e-5, "relu", CHANNELS_LAST)
    problem = Problem("batch_norm_train", attrs, (x, c, c), OPS["batch_norm_train"].outputs(attrs, x, c, c))
    kernel = good("batch_norm_train")
    material = Material(find(problem.op), problem)
    right = kernel.prepare(problem, (), CPU)
    last = len(problem.outputs) - 1

    def flip(count):
        def run(inputs, outputs):
            right(inputs, outputs)
            outputs[last].raw[100 : 100 + count] ^= 4

        return run

    assert problem.outputs[last].dtype.name == "uint8"
    assert check(problem, CPU, kernel, (), flip(1), material).status == "ok"
    assert check(problem, CPU, kernel, (), flip(9), material).reason.startswith(f"output {last} differs from the reference at")
