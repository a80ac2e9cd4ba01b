"""Interleaved comparison of Tilewright with a peer: two worker processes that take turns.

Each side lives in a process of its own, because two libraries in one process share an OpenMP runtime or an
allocator and disturb each other. A worker whose turn it is not is blocked reading its pipe. OpenMP's default
wait policy is left alone on both sides (its threads spin for a few milliseconds after a parallel region; a
passive policy makes either side two to three times slower), so the driver pauses between turns.

A turn during which other processes took more than `FOREIGN` of the processors is repeated, a few times at
most; the criterion does not look at the time measured. A row whose foreign load stays higher is called noisy,
and is neither met nor missed.

Before anything is timed, the first results of both sides, from the same weights and inputs, must agree.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = {"pytorch-eager": "benchmarks.peers.torch_models"}
OURS = "benchmarks.peers.tilewright_models"
PAUSE_S = 0.02  # longer than libgomp's default spinning
TURN_S = 0.3  # a turn lasts about this long, or one call
FOREIGN = 0.08  # share of all processors' time
REPEATS = 2


@dataclass(frozen=True)
class Case:
    """One row: `builder(**arguments, threads=...)` exists in the module of either side."""

    name: str
    builder: str
    arguments: dict[str, Any]
    rtol: float = 1e-4  # of the first result; ten times more for each next, as training amplifies rounding
    target: float | None = None  # the ratio the project asks for


@dataclass
class Row:
    case: str
    device: str
    peer: str | None
    ours_s: float
    peer_s: float | None = None
    ratio: float | None = None
    ratio_q1: float | None = None
    ratio_q3: float | None = None
    ours_iqr_s: float = 0.0
    peer_iqr_s: float | None = None
    target: float | None = None
    foreign: float | None = None  # share of the processors' time that went to other processes, mean
    noisy: bool = False  # foreign load stayed above `FOREIGN`: the figures of this row prove nothing
    rounds: int = 0
    threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)


class WorkerError(RuntimeError):
    """A side could not be built or run; the message holds its traceback's last lines."""


class Worker:
    """One side of a case, in its own process, idle (blocked on a pipe) unless asked for something."""

    def __init__(self, module: str, case: Case, threads: int, extra: dict[str, Any], python: str) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads))
        paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks._harness", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        arguments = {**case.arguments, **extra, "threads": threads}
        answer = self._ask({"module": module, "builder": case.builder, "arguments": arguments})
        self.first: list[list[float]] = answer["first"]
        self.versions: dict[str, str] = answer["versions"]

    def run(self, calls: int) -> list[float]:
        """Seconds of each of `calls` calls."""
        return self._ask({"calls": calls})["seconds"]

    def turn(self, calls: int) -> tuple[float, float | None]:
        """Median seconds of `calls` calls, and the share of the processors that went to other processes."""
        before, start = _busy_seconds(), time.perf_counter()
        answer = self._ask({"calls": calls})
        after, wall = _busy_seconds(), time.perf_counter() - start
        median = statistics.median(answer["seconds"])
        if before is None or after is None:
            return median, None
        return median, max(0.0, after - before - answer["cpu_s"]) / (wall * (os.cpu_count() or 1))

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the worker ended with status {self.process.wait()} and no answer")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


def _serve() -> None:
    """The worker's loop: build once, then time calls when asked."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    step: Callable[[], Any] = lambda: None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "module" in message:
                module = importlib.import_module(message["module"])
                step, numbers = getattr(module, message["builder"])(**message["arguments"])
                first = [numbers(step()) for _ in range(3)]
                answer = {"first": first, "versions": module.versions()}
            else:
                seconds = []
                cpu = time.process_time()
                for _ in range(message["calls"]):
                    start = time.perf_counter()
                    step()
                    seconds.append(time.perf_counter() - start)
                answer = {"seconds": seconds, "cpu_s": time.process_time() - cpu}
        except BaseException as error:
            import traceback

            answer = {"error": "".join(traceback.format_exception(error)[-4:])}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _busy_seconds() -> float | None:
    """Processor time that all processes together have used, or that was stolen by other machines."""
    if sys.platform != "linux":
        return None
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _iqr(values: Sequence[float]) -> float:
    q1, _, q3 = _quartiles(values)
    return q3 - q1


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def _check_agreement(case: Case, ours: list[list[float]], peer: list[list[float]]) -> None:
    for index, (left, right) in enumerate(zip(ours, peer, strict=True)):
        scale = max(abs(v) for v in right) or 1.0
        error = max(abs(a - b) for a, b in zip(left, right, strict=True)) / scale
        allowed = case.rtol * 10**index
        if not error <= allowed:
            raise WorkerError(
                f"{case.name}: result {index} of the two sides differs by {error:.2e} of its largest value"
                f" (allowed {allowed:.0e}): ours {left[:4]}, peer {right[:4]}; mend that first"
            )


def measure(case: Case, peer: str | None, options: argparse.Namespace) -> Row:
    """Median seconds per call of both sides over `options.rounds` rounds, the order alternating.

    The rounds are spread over `options.launches` fresh pairs of workers: where a process's memory happens to
    lie can move its times for as long as it lives.
    """
    medians: dict[str, list[float]] = {}
    versions: dict[str, str] = {}
    foreign: list[float] = []
    launches = min(options.launches, options.rounds)
    for launch in range(launches):
        rounds = range(launch, options.rounds, launches)
        workers = {}
        try:
            workers["ours"] = Worker(OURS, case, options.threads, {"device": options.device}, sys.executable)
            if peer is not None:
                workers["peer"] = Worker(PEERS[peer], case, options.threads, {}, options.peer_python)
                _check_agreement(case, workers["ours"].first, workers["peer"].first)
            for side, turns in _take_turns(workers, len(rounds)).items():
                medians.setdefault(side, []).extend(seconds for seconds, _ in turns)
                foreign += [share for _, share in turns if share is not None]
        finally:
            for worker in workers.values():
                worker.close()
        for worker in workers.values():
            versions |= worker.versions
    ours = medians["ours"]
    row = Row(case.name, options.device, peer, statistics.median(ours), ours_iqr_s=_iqr(ours), target=case.target)
    row.foreign = statistics.fmean(foreign) if foreign else None
    row.noisy = (row.foreign or 0.0) > FOREIGN
    row.rounds, row.threads, row.versions = options.rounds, options.threads, versions
    if peer is not None:
        theirs = medians["peer"]
        row.peer_s, row.peer_iqr_s = statistics.median(theirs), _iqr(theirs)
        row.ratio = row.ours_s / row.peer_s
        row.ratio_q1, _, row.ratio_q3 = _quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return row


def _take_turns(workers: dict[str, Worker], rounds: int) -> dict[str, list[tuple[float, float | None]]]:
    """(median seconds, foreign share) per side and round; a turn is as many calls as fit in `TURN_S`."""
    calls = {}
    for side, worker in workers.items():
        worker.run(2)
        calls[side] = max(1, min(2000, round(TURN_S / statistics.median(worker.run(3)))))
    turns: dict[str, list[tuple[float, float | None]]] = {side: [] for side in workers}
    for index in range(rounds):
        order = list(workers) if index % 2 == 0 else list(reversed(workers))
        for side in order:
            tried = []
            for _ in range(1 + REPEATS):
                time.sleep(PAUSE_S)
                if calls[side] > 3:
                    workers[side].run(1)  # the other side has emptied the caches
                tried.append(workers[side].turn(calls[side]))
                if (tried[-1][1] or 0.0) <= FOREIGN:
                    break
            turns[side].append(min(tried, key=lambda turn: turn[1] or 0.0))
    return turns


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures: processor, cores, memory, system, versions, time."""
    model = platform.processor()
    memory = None
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value >= 1e-2 else f"{value * 1e6:.0f} us"


def verdict(value: float | None, target: float | None) -> str:
    if value is None or target is None:
        return "-"
    return f"<= {target:g} {'met' if value <= target else 'MISSED'}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal, plain columns elsewhere."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*header, title=title)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(title)
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_json(path: Path | None, name: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": list(rows), **more}, indent=1) + "\n")


def main(name: str, cases: Sequence[Case], description: str, arguments: Sequence[str] | None = None) -> int:
    """Run a comparison from the command line; returns 1 when a row misses its target, fails or is noisy."""
    parser = argparse.ArgumentParser(name, description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and machine description here")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--launches", type=int, default=3, help="fresh pairs of processes the rounds are spread over")
    parser.add_argument("--threads", type=int, default=machine()["cores"], help="threads on both sides")
    parser.add_argument("--cases", default="", help="only cases whose name contains one of these, comma-separated")
    parser.add_argument("--peer", default="pytorch-eager", choices=[*PEERS, "none"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peer installed")
    options = parser.parse_args(arguments)
    wanted = [word for word in options.cases.split(",") if word]
    chosen = [case for case in cases if not wanted or any(word in case.name for word in wanted)]
    if not chosen:
        parser.error(f"no case matches {options.cases!r}; there are {', '.join(case.name for case in cases)}")
    peer = None if options.peer == "none" else options.peer
    rows: list[Row] = []
    failed: list[str] = []
    for case in chosen:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(measure(case, peer, options))
        except WorkerError as error:
            failed.append(f"{case.name}: {error}")
            print(failed[-1], file=sys.stderr)
    header = (
        "case",
        "device",
        "threads",
        "peer",
        "ours",
        "peer time",
        "ratio",
        "quartiles",
        "foreign",
        "target",
    )
    table = [
        (
            row.case,
            row.device,
            str(row.threads),
            row.peer or "-",
            _seconds(row.ours_s),
            _seconds(row.peer_s),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            "-" if row.ratio is None else f"{row.ratio_q1:.3f} .. {row.ratio_q3:.3f}",
            "-" if row.foreign is None else f"{row.foreign:.0%}",
            "noisy, run again" if row.noisy else verdict(row.ratio, row.target),
        )
        for row in rows
    ]
    print_table(f"{name} (median of {options.rounds} interleaved rounds; ratio = ours / peer)", header, table)
    write_json(options.json, name, [vars(row) for row in rows], failed=failed)
    missed = any(row.noisy or verdict(row.ratio, row.target).endswith("MISSED") for row in rows)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    if sys.argv[1:] != ["--worker"]:
        sys.exit("this module is run by the benchmarks beside it: try python benchmarks/cpu_training.py")
    _serve()
