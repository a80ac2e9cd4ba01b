"""The contract tests themselves: they meet a new op and kernel unasked, and they fail when a kernel is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.contract import _contract
from tilewright import devices
from tilewright.devices.api import Kernel, registered
from tilewright.ops._op import OPS

CPU = devices.get("cpu")


class Broken(Kernel):
    """A right kernel, spoilt after each launch."""

    device = "cpu"

    def __init__(self, op, spoil, deterministic=True):
        self.op, self.spoil, self.deterministic = op, spoil, deterministic
        self.id = f"cpu.{op}.broken"
        self.good = next(k for k in registered("cpu", op) if "onednn" not in k.id)

    def prepare(self, problem, config, device):
        launch = self.good.prepare(problem, config, device)

        def run(inputs, outputs):
            launch(inputs, outputs)
            self.spoil(problem, inputs, outputs)

        return run


def negate(problem, inputs, outputs):
    a = outputs[0].array(problem.outputs[0])
    np.negative(a, out=a)


def leave_one_unwritten(problem, inputs, outputs):
    if problem.outputs[0].nbytes:
        outputs[0].raw[problem.outputs[0].nbytes - 1] = 0xFF


def write_past_the_end(problem, inputs, outputs):
    outputs[0].keep.raw[_contract.GUARD + problem.outputs[0].nbytes] = 0


def write_an_input(problem, inputs, outputs):
    if inputs[0].nbytes:
        inputs[0].raw[0] ^= 1


def add_a_little(problem, inputs, outputs):
    outputs[0].array(problem.outputs[0])[...] += 1e-3


def differ_each_time(problem, inputs, outputs):
    if problem.outputs[0].size:
        a = outputs[0].array(problem.outputs[0])
        a.reshape(-1)[0] *= 1 + np.float32(1e-7) * np.random.default_rng().integers(1, 9)


@pytest.mark.parametrize("spoil", [negate, leave_one_unwritten, write_past_the_end, write_an_input, add_a_little], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["conv2d", "add", "conv2d_weight_grad", "tanh"])
def test_a_broken_kernel_is_found(name, spoil):
    op = OPS[name]
    with pytest.raises(_contract.Violation):
        for sample in op.samples():
            _contract.check_kernel(Broken(name, spoil), op, sample, CPU)


def test_a_kernel_that_does_not_repeat_is_found():
    op = OPS["tanh"]
    with pytest.raises(_contract.Violation, match="two runs differ"):
        for _ in range(20):
            for sample in op.samples()[:1]:
                _contract.check_kernel(Broken("tanh", differ_each_time), op, sample, CPU)


def test_a_wrong_gradient_is_found():
    import dataclasses

    op = OPS["tanh"]
    wrong = object.__new__(type(op))
    for field in dataclasses.fields(op):
        object.__setattr__(wrong, field.name, getattr(op, field.name))
    object.__setattr__(wrong, "vjp", lambda node, g: -op.vjp(node, g))
    with pytest.raises(_contract.Violation, match="gradient"):
        _contract.check_gradient(wrong, op.samples()[0])


DUMMY_OP = '''
from tilewright.ops._call import call
from tilewright.ops._op import Arg, Op, Sample


def _vjp(node, g):
    return g * 2.0


TWICE = Op("twice", lambda a, x: x, lambda a, x: 2 * x, _vjp, lambda: [Sample((Arg((2, 3)),))], saves=())


def twice(x):
    """2 x."""
    return call(TWICE, (x,))
'''

DUMMY_KERNEL = """
import numpy as np

from tilewright.devices.cpu.numpy._base import numpy_kernel


@numpy_kernel("twice")
def _twice(attrs, out, x):
    np.multiply(x, SIGN * 2, out=out)
"""


@pytest.mark.parametrize(("sign", "fails"), [(1, False), (-1, True)])
def test_new_files_are_met_unasked(tmp_path, sign, fails):
    """An op file and a kernel file laid into the packages' folders are tested; with one sign wrong the tests fail."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "ops" / "twice.py").write_text(DUMMY_OP)
    (tmp_path / "kernels" / "twice.py").write_text(DUMMY_KERNEL.replace("SIGN", str(sign)))
    (tmp_path / "plugin.py").write_text(
        textwrap.dedent(
            f"""
            import importlib.util, sys

            # Lengthen the two packages' search paths before they are first imported, as a new file in them would.
            for name, folder in (("tilewright.ops", "ops"), ("tilewright.devices.cpu.numpy", "kernels")):
                class Finder:
                    def __init__(self, name, folder):
                        self.name, self.folder = name, folder

                    def find_spec(self, name, path=None, target=None):
                        if name != self.name:
                            return None
                        sys.meta_path.remove(self)
                        spec = importlib.util.find_spec(name)
                        spec.submodule_search_locations.append({str(tmp_path)!r} + "/" + self.folder)
                        return spec

                sys.meta_path.insert(0, Finder(name, folder))
            """
        )
    )
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "-k",
            "twice",
            "tests/contract/test_ops.py",
            "tests/contract/test_kernels.py",
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "TILEWRIGHT_TEST_DEVICES": "cpu",  # the new kernel is the CPU's alone
        },
    )
    if fails:
        assert told.returncode == 1, told.stdout + told.stderr
        assert "from the reference" in told.stdout
    else:
        assert told.returncode == 0, told.stdout + told.stderr
        assert " passed" in told.stdout
