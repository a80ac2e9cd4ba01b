"""How a primitive can be run other than plainly: on one thread, or with a result that is brought back to its own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tilewright.devices.cpu.onednn import capi, runtime
from tilewright.devices.cpu.onednn._common import Reorder
from tilewright.devices.cpu.onednn.capi import MemoryDesc, PrimitiveDesc

# Multiply-adds a thread from which waking the others pays. On an idle machine with two cores they pay sooner, but where
# another process holds a core, waiting for each other costs threads a time slice: milliseconds in place of microseconds.
ALONE = 1 << 20


def thread_configs(work: float) -> list[tuple[tuple[str, int], ...]]:
    """Parts of configs for a problem of so many multiply-adds: all threads, and one where they are little to share."""
    threads = runtime.get_num_threads()
    alone = threads > 1 and work < ALONE * threads and capi.load().runtime == "openmp"
    return [(), (("threads", 1),)] if alone else [()]


def planned(config: Any) -> Any:
    """The context in which to describe and bind primitives for a config: with its number of threads."""
    return runtime.planned_for(dict(config).get("threads", runtime.get_num_threads()))


class Operand(NamedTuple):
    """An argument of a primitive: its index, how the primitive has it and, for a result, how it is to lie if otherwise."""

    arg: int
    wanted: MemoryDesc
    held: MemoryDesc | None = None

    @property
    def moved(self) -> bool:
        return self.held is not None and self.held != self.wanted


def bind(pd: PrimitiveDesc, operands: Sequence[Operand], pool: Any) -> Callable[..., None]:
    """A run on the addresses of operands as they lie, with a reorder afterwards for each result that must be moved."""
    run = runtime.bind(pd, [(o.arg, o.wanted) for o in operands]).run
    moved = [(i, o) for i, o in enumerate(operands) if o.moved]
    if moved:
        run = _with_reorders(run, moved, pool)
    return run if pd.threads == runtime.all_threads() else _giving_back_threads(run)


def _with_reorders(run: Callable[..., None], moved: list[tuple[int, Operand]], pool: Any) -> Callable[..., None]:
    back = [(i, Reorder(o.wanted, o.held).run, o.wanted.nbytes) for i, o in moved]  # type: ignore[arg-type]
    take = pool.take

    def staged(*addresses: int) -> None:
        places, held = list(addresses), []
        for i, _, nbytes in back:
            buffer = take(nbytes)
            held.append(buffer)
            places[i] = buffer.ptr
        run(*places)
        for i, reorder, _ in back:
            reorder(places[i], addresses[i])

    return staged


def _giving_back_threads(run: Callable[..., None]) -> Callable[..., None]:
    """The number of threads is a setting of the Python thread, for whatever else there uses the same OpenMP library."""

    def alone(*addresses: int) -> None:
        try:
            run(*addresses)
        finally:
            runtime.enter().use_threads(runtime.all_threads())

    return alone
