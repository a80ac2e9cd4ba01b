"""The candidates of a problem, checked and timed: in this process (`trials`) or in one that may hang or crash (`Worker`).

A worker is a process of its own that measures one problem after another. It says beforehand, in a few bytes of shared
memory, which candidate it is about to launch; when it dies, or nothing moves for too long, exactly that candidate is
recorded as failed or timed out, and a new worker goes on with the rest. So does one after a candidate that wrote outside
its buffers, since nobody knows what else it hit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import math
import mmap
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright import devices
from tilewright.devices.api import Config, Device, Kernel, Launch, Problem, Unusable, registered
from tilewright.errors import KernelError
from tilewright.tune.bench import HOPELESS, Timing, bench
from tilewright.tune.check import STRAY, Material, check, describe

Candidate = tuple[Kernel, Config]

TIMEOUT_S = 30.0
MATERIAL_S = 120.0  # what importing the library, drawing the operands and computing the reference may take
_NOBODY = -1  # the mark while no candidate runs
_MARK = struct.Struct("=qq")  # marks so far, candidate


@dataclass(frozen=True)
class Trial:
    """What came of one candidate. Times in seconds a launch, None where there is none.

    status: "ok", "wrong" (its result, or it wrote where it must not), "failed" (it raised, or its process died), "timeout",
    "over-limit" (of memory), or "skipped" (the budget was spent before its turn: says nothing about it). `spread` is the
    interquartile range of `count` samples, None for fewer than two; `dropped`: timing ended early since it could not win.
    """

    kernel: str
    config: Config
    status: str
    reason: str = ""
    median: float | None = None
    spread: float | None = None
    count: int = 0
    dropped: bool = False


def trials(
    problem: Problem,
    device: Device,
    candidates: Sequence[Candidate],
    material: Material,
    *,
    budget_s: float = 0.25,
    cold: bool = False,
    workspace: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    checked: Sequence[Candidate] = (),
    mark: Callable[[int], None] | None = None,
    done: Callable[[int, Trial], None] | None = None,
    right: Callable[[int], None] | None = None,
) -> tuple[list[Trial], dict[int, Launch]]:
    """Check every candidate, then time those that are right against each other. One Trial for each, in their order, and the
    launches of those that are right, by their number. `bench.rank` orders the trials.

    budget_s: seconds for all of it (`material` is there already), and at most a check or a launch more; candidates that it
    does not reach are "skipped". A quarter of
    it is kept for timing, unless a single check takes longer. cold, clock: see `bench`.
    workspace: bytes of temporary memory a candidate may need (None: any). checked: those known to be right.
    mark(number): that candidate is about to run. right(number): it passed the check. done(number, trial): its trial is final.
    """
    began = clock()
    found: dict[int, Trial] = {}
    launches: dict[int, Launch] = {}
    known: dict[int, float] = {}

    def finish(i: int, status: str, reason: str = "", timing: Timing | None = None) -> None:
        kernel, config = candidates[i]
        if timing is None or not timing.count:
            found[i] = Trial(kernel.id, config, status, reason)
        else:
            spread = timing.spread if math.isfinite(timing.spread) else None
            found[i] = Trial(kernel.id, config, status, reason, timing.median, spread, timing.count, timing.dropped)
        if done is not None:
            done(i, found[i])

    for i, candidate in enumerate(candidates):
        kernel, config = candidate
        if clock() - began > 0.75 * budget_s and i:
            finish(i, "skipped", f"the {budget_s:g} s allowed were spent before its turn")
            continue
        if mark is not None:
            mark(i)
        try:
            needs = kernel.workspace(problem, config)
            if workspace is not None and needs > workspace:
                finish(i, "over-limit", f"it needs {needs} bytes of workspace and {workspace} are allowed")
                continue
            launch = kernel.prepare(problem, config, device)
        except Unusable as error:
            finish(i, "failed", str(error))
            continue
        except Exception as error:
            finish(i, "failed", describe(error))
            continue
        if candidate not in checked:
            patience = max(HOPELESS * min(known.values(), default=0.05 * budget_s), 0.02 * budget_s)
            result = check(problem, device, kernel, config, launch, material, patience_s=patience, clock=clock)
            if result.status != "ok":
                finish(i, result.status, result.reason)
                continue
            if result.seconds is not None:
                known[i] = result.seconds
            if right is not None:
                right(i)
        launches[i] = launch

    shortest = min(known.values(), default=math.inf)
    rest = budget_s - (clock() - began)
    rivals: dict[int, Launch] = {}
    for i in sorted(launches, key=lambda i: known.get(i, 0.0)):
        if known.get(i, 0.0) > max(HOPELESS * shortest, 0.25 * rest):
            finish(i, "ok", timing=Timing(samples=[known[i]], dropped=True))
        else:
            rivals[i] = launches[i]

    def outputs() -> tuple[Sequence[Any], Sequence[Any]]:
        return material.on(device), [device.allocate(s.nbytes) for s in problem.outputs]

    def timed(i: int, timing: Timing) -> None:
        if timing.status == "skipped" and i in known:  # the launches of its check are all there is
            timing = Timing(samples=[known[i]])
        finish(i, timing.status, timing.reason, timing)

    bench(
        rivals,
        outputs,
        clock=clock,
        timer=device.seconds,
        budget_s=rest,
        cold=cold,
        known=None if cold else known,
        before=mark,
        finished=timed,
    )
    return [found[i] for i in range(len(candidates))], launches


# -- the parent's side -------------------------------------------------------------------------------------------------


class Worker:
    """Measures problems in another process, which is started when first needed and again whenever it was lost.

    device: that the candidates run on. find: gives an op by its name; it must be a function of a module, so that the worker
    can import it. timeout_s: how long one candidate may go without any progress. Use it in a `with` block, or `close` it.
    """

    def __init__(self, device: Device, find: Callable[[str], Any], *, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.find = find
        self.timeout_s = timeout_s
        self.starts = 0  # how many processes there have been
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The worker process there is now."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def measure(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        *,
        budget_s: float = 1.0,
        cold: bool = False,
        workspace: int | None = None,
        seed: int = 0,
    ) -> Iterator[Trial]:
        """One Trial for every candidate, each as soon as it is final: those that are wrong or lost first, the winner last.

        The arguments are those of `trials`; the budget is a worker's, so that each one lost may cost it again.
        Raises KernelError where no operands for the problem can be made.
        """
        left = dict(enumerate(candidates))
        right: set[int] = set()
        alone = 0  # processes lost while no candidate ran
        whole = False
        try:
            while left:
                named = [(i, k.id, type(k).__module__, config, i in right) for i, (k, config) in left.items()]
                options = {"budget_s": budget_s, "cold": cold, "workspace": workspace}
                self._send((problem, self.device.name, self.find, named, options, seed, self.timeout_s))
                kind, number, value = self._next()
                while kind in ("trial", "right"):
                    if kind == "trial":
                        del left[number]
                        yield value
                    else:
                        right.add(number)
                    kind, number, value = self._next()
                if kind == "no operands":
                    whole = True
                    raise KernelError(value)
                if kind == "renew":
                    self.close()
                elif kind in ("failed", "timeout"):
                    if number in left:
                        kernel, config = left.pop(number)
                        yield Trial(kernel.id, config, kind, value)
                    else:
                        alone += 1
                        while left and alone > 1:
                            kernel, config = left.pop(next(iter(left)))
                            yield Trial(kernel.id, config, kind, f"{value} while no candidate ran")
            whole = True
        finally:
            if not whole:  # what it still has to say must not be taken for another problem's
                self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        self._reader.join()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # what could not be sent any more
            process.stdin.close()
        process.stdout.close()
        self._shared.close()
        self._errors.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _start(self) -> None:
        self.starts += 1
        handle, self._path = tempfile.mkstemp(prefix="tilewright-worker-")
        try:
            os.write(handle, _MARK.pack(0, _NOBODY))
            self._shared = mmap.mmap(handle, _MARK.size)
        finally:
            os.close(handle)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        code = f"from tilewright.tune.worker import main; main({self._path!r}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._answers = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()

    def _send(self, request: Any) -> None:
        data = pickle.dumps(request)
        if self._process is not None and self._process.poll() is not None:  # lost between two problems
            self.close()
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died since: `_next` tells
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _next(self) -> tuple[str, int, Any]:
        """The next answer, or how the process was lost and the candidate that ran; it is closed then."""
        seen, since = None, time.monotonic()
        while True:
            try:
                answer = self._answers.get(timeout=0.1)
            except queue.Empty:
                answer = ()
            if answer:
                return answer
            mark = self._shared[:]
            number = _MARK.unpack(mark)[1]
            if answer is None:
                return "failed", number, self._obituary()
            if mark != seen:
                seen, since = mark, time.monotonic()
            limit = self.timeout_s if number >= 0 else max(self.timeout_s, MATERIAL_S)
            if time.monotonic() - since > limit:
                self.close()
                return "timeout", number, f"it made no progress for {limit:g} s"

    def _obituary(self) -> str:
        """What the process died of; it is closed."""
        assert self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        if code < 0:
            try:
                return f"its process died of {signal.Signals(-code).name}"
            except ValueError:
                return f"its process died of signal {-code}"
        return f"its process ended with code {code}{': ' + lines[-1] if lines else ''}"


def _read(stream: Any, answers: queue.SimpleQueue[Any]) -> None:
    """The answers that come through a pipe, into a queue that can be waited for with a timeout."""
    while True:
        try:
            answers.put(pickle.load(stream))
        except Exception:  # the end, or half an answer
            answers.put(None)
            return


# -- the worker's side -------------------------------------------------------------------------------------------------


def main(path: str, parent: int) -> None:
    """Serve requests from standard input until it ends. path: the file shared with the process `parent`, for the marks, which may be gone already."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a candidate prints must not come between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), _MARK.size)
    marks = 0

    def mark(number: int) -> None:
        nonlocal marks
        marks += 1
        shared[:] = _MARK.pack(marks, number)

    def say(kind: str, number: int, value: Any = None) -> None:
        pickle.dump((kind, number, value), answers)
        answers.flush()

    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        mark(_NOBODY)
        _serve(request, mark, say)


def _follow(parent: int) -> None:
    """End with the parent, also in the midst of a candidate that would never return."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(request: Any, mark: Callable[[int], None], say: Callable[..., None]) -> None:
    problem, name, find, named, options, seed, timeout_s = request
    device = devices.get(name)
    candidates: list[Candidate] = []
    checked: list[Candidate] = []
    numbers: list[int] = []
    for number, kernel_id, module, config, known in named:
        kernel = _kernel(device, problem.op, kernel_id, module)
        if kernel is None:
            say("trial", number, Trial(kernel_id, config, "failed", f"kernel {kernel_id} is not registered by module {module}"))
        else:
            candidates.append((kernel, config))
            numbers.append(number)
            if known:
                checked.append((kernel, config))
    try:
        material = Material(find(problem.op), problem, seed)
    except KernelError as error:
        say("no operands", _NOBODY, str(error))
        return

    def done(i: int, trial: Trial) -> None:
        say("trial", numbers[i], trial)
        if trial.status == "wrong" and trial.reason.startswith(STRAY):
            say("renew", _NOBODY)
            os._exit(0)

    # A candidate that hangs with the interpreter's lock held lets no thread of Python's run, should the parent be killed: one of C's ends it.
    faulthandler.dump_traceback_later(len(candidates) * timeout_s + MATERIAL_S, exit=True)
    try:
        trials(
            problem,
            device,
            candidates,
            material,
            checked=checked,
            mark=lambda i: mark(numbers[i]),
            right=lambda i: say("right", numbers[i]),
            done=done,
            **options,
        )
    finally:
        faulthandler.cancel_dump_traceback_later()
    mark(_NOBODY)
    say("end", _NOBODY)


def _kernel(device: Device, op: str, kernel_id: str, module: str) -> Kernel | None:
    """The registered kernel of that id; the module that defines its class registers those from outside the library."""
    for attempt in range(2):
        found = next((k for k in registered(device.kind, op) if k.id == kernel_id), None)
        if found is not None or attempt:
            return found
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return None
