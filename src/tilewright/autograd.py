"""Reverse-mode differentiation: the tape, `backward`, `grad`, `no_grad` and `gradcheck`.

Ops record a `Node` on the tensors they return. Walking nodes from the newest to the oldest visits each one after
everything that used it, since a node is always newer than its inputs: no recursion and no separate sort.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.devices.api import sequence
from tilewright.errors import AutogradError, ShapeError
from tilewright.tensor import Tensor, ones_like

if TYPE_CHECKING:
    from tilewright.ops._op import Op


class _Mode(threading.local):
    def __init__(self) -> None:
        self.enabled = True
        self.before: list[bool] = []
        self.node: Node | None = None  # whose gradient is computed now


mode = _Mode()


class _GradMode:
    """Context manager and decorator, for this thread only."""

    def __init__(self, enabled: bool) -> None:
        self._wanted = enabled

    def __enter__(self) -> None:
        mode.before.append(mode.enabled)
        mode.enabled = self._wanted

    def __exit__(self, *exc: object) -> None:
        mode.enabled = mode.before.pop()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with _GradMode(self._wanted):
                return fn(*args, **kwargs)

        return inner


def no_grad() -> _GradMode:
    """Record nothing in this thread, inside `with` or a decorated function. Values and dtypes stay the same."""
    return _GradMode(False)


def enable_grad() -> _GradMode:
    """Record again inside a `no_grad`."""
    return _GradMode(True)


def is_grad_enabled() -> bool:
    return mode.enabled


Hook = Callable[[Tensor], "Tensor | None"]


class Node:
    """One recorded call: what its gradient needs, and the way to its inputs.

    For an op's `vjp(node, *gradients)`: `attrs`; `inputs` (tensors, only those the op saves, else None); `specs` of all
    inputs; `outputs` (only those the op saves); `needs` (per input, is a gradient wanted). Gradients of outputs that
    nothing used are None.
    """

    __slots__ = (
        "_inputs",
        "_kept",
        "_outputs",
        "attrs",
        "device",
        "edges",
        "hooks",
        "needs",
        "op",
        "out_specs",
        "seq",
        "specs",
    )

    def __init__(
        self,
        op: Op,
        attrs: Any,
        device: Any,
        inputs: Sequence[Tensor | None],
        specs: Any,
        out_specs: Any,
        outputs: Any,
    ) -> None:
        self.seq = next(sequence)
        self.op = op
        self.attrs = attrs
        self.device = device
        self.specs = specs
        self.out_specs = out_specs
        needs = []
        edges: list[Any] = []
        for t in inputs:
            if t is not None and t.requires_grad:
                needs.append(True)
                node = t._node
                edges.append(t if node is None else (node, t._index))
            else:
                needs.append(False)
                edges.append(None)
        self.needs = needs
        self.edges = edges
        saves = op.saves
        self._inputs = inputs if saves is None else [t if i in saves else None for i, t in enumerate(inputs)]
        self._outputs = outputs if op.saves_outputs else None  # buffers, not tensors: those point back to this node
        self._kept: list[Any] | None = None
        self.hooks: list[tuple[int, Hook]] | None = None

    @property
    def inputs(self) -> Sequence[Any]:
        if self._inputs is None:
            raise AutogradError(f"{self.op.name}: its saved tensors were freed by an earlier backward; pass retain_graph=True to the first")
        return self._inputs

    @property
    def outputs(self) -> list[Tensor]:
        if self._outputs is None:
            raise AutogradError(f"{self.op.name}: its saved outputs were freed by an earlier backward; pass retain_graph=True to the first")
        out = []
        for i, (buffer, spec) in enumerate(zip(self._outputs, self.out_specs, strict=True)):
            t = Tensor(buffer, spec, self.device)
            if spec.dtype.is_floating:
                t.requires_grad, t._node, t._index = True, self, i
            out.append(t)
        return out

    def keep_grad(self, t: Tensor) -> None:
        if self._kept is None:
            self._kept = []
        if all(ref() is not t for _, ref in self._kept):
            self._kept.append((t._index, weakref.ref(t)))

    def check_unchanged(self) -> None:
        """Raise AutogradError if what the gradient reads was written to after this call saved it."""
        seq = self.seq
        inputs: Any = self._inputs
        for i, t in enumerate(inputs):
            if t is not None and (stamp := t.buffer.stamped) is not None and stamp.written > seq:
                # Products read only the other operands: where one input alone needs its gradient, it may have changed.
                if self.needs.count(True) > self.needs[i] or sum(s is not None for s in inputs) == 1:
                    raise AutogradError(self._changed(f"input {i}, of shape {t.shape}"))
        if self._outputs is not None:
            for i, buffer in enumerate(self._outputs):
                if (stamp := buffer.stamped) is not None and stamp.written > seq:
                    raise AutogradError(self._changed(f"result, of shape {self.out_specs[i].shape}"))

    def _changed(self, what: str) -> str:
        return (
            f"{self.op.name}: its {what}, is needed for the gradient and was changed in place (an optimizer's step, copy_, "
            "x[...] = value or numpy(writable=True)) after the op ran; change it after backward, or pass the op a clone()"
        )

    def free(self) -> None:
        self._inputs = None
        self._outputs = None

    @property
    def freed(self) -> bool:
        return self._inputs is None


def _run(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor],
    wanted: set[int] | None,
    retain_graph: bool,
    create_graph: bool,
) -> dict[int, Tensor]:
    """Gradients of the leaves (or of the tensors whose keys are in `wanted`), by key."""
    grads: dict[Any, list[Any]] = {}  # node -> gradient per output
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    found: dict[Any, Tensor] = {}
    lent = {id(s.buffer): s.buffer for s in seeds}  # memory that `.grad` must not share: the caller's, another `.grad`'s
    heap: list[tuple[int, Node]] = []

    def add(edge: Any, gradient: Tensor) -> None:
        if isinstance(edge, Tensor):
            held = leaves.get(id(edge))
            leaves[id(edge)] = (edge, gradient if held is None else held[1] + gradient)
            return
        node, index = edge
        slots = grads.get(node)
        if slots is None:
            slots = grads[node] = [None] * len(node.out_specs)
            heapq.heappush(heap, (-node.seq, node))
        slots[index] = gradient if slots[index] is None else slots[index] + gradient

    useful = {} if wanted is None else _towards(roots, wanted)
    before = mode.enabled
    mode.enabled = create_graph
    try:
        for root, seed in zip(roots, seeds, strict=True):
            add(root if root._node is None else (root._node, root._index), seed)
        while heap:
            node = heapq.heappop(heap)[1]
            gradients = grads.pop(node)
            if node.hooks is not None:
                for index, hook in tuple(node.hooks):
                    if gradients[index] is not None:
                        gradients[index] = _hooked(hook, gradients[index])
            if node._kept is not None:
                for index, ref in node._kept:
                    t = ref()
                    if t is not None and gradients[index] is not None:
                        t.grad = _own(gradients[index], lent) if t.grad is None else t.grad + gradients[index]
            needs = node.needs
            if wanted is not None:
                for index, gradient in enumerate(gradients):
                    if (node.seq, index) in wanted and gradient is not None:
                        found[(node.seq, index)] = gradient
                needs = useful.get(node)
                if needs is None:
                    continue  # nothing asked for lies behind it
            if node.freed:
                raise AutogradError(f"{node.op.name}: this graph was already walked and freed; pass retain_graph=True to the first backward")
            node.check_unchanged()
            all_needs, node.needs = node.needs, needs
            mode.node = node
            try:
                back = node.op.vjp(node, *gradients)  # type: ignore[misc]
            finally:
                node.needs = all_needs
            if not retain_graph:
                node.free()
            for need, edge, gradient in zip(needs, node.edges, back if isinstance(back, tuple) else (back,), strict=True):
                if need and gradient is not None:
                    add(edge, gradient)
            del gradients, back, gradient  # else their memory would wait for the next node's
        for key, (leaf, gradient) in leaves.items():
            hooks: Any = getattr(leaf, "_hooks", ())
            for _, hook in tuple(hooks):
                gradient = _hooked(hook, gradient)
            found[key] = gradient
        if wanted is None:
            for key, (leaf, _) in leaves.items():
                gradient = found[key]
                if not create_graph:
                    gradient = gradient.detach()
                if gradient.spec is not leaf.spec:
                    gradient = gradient.to(dtype=leaf.dtype, layout=leaf.layout)
                leaf.grad = _own(gradient, lent) if leaf.grad is None else leaf.grad + gradient
    finally:
        mode.enabled = before
        mode.node = None
    return found


def _own(gradient: Tensor, lent: dict[int, Any]) -> Tensor:
    """`gradient`, in memory that no one else was given: one gradient may reach several leaves, or be the caller's."""
    key = id(gradient.buffer)
    if key in lent:
        return gradient.clone()
    lent[key] = gradient.buffer
    return gradient


def _hooked(hook: Hook, gradient: Tensor) -> Tensor:
    out = hook(gradient)
    if out is None:
        return gradient
    if not isinstance(out, Tensor) or out.shape != gradient.shape:
        given = f"shape {out.shape}" if isinstance(out, Tensor) else type(out).__name__
        raise AutogradError(f"register_hook: a hook must return None or a Tensor of the gradient's shape {gradient.shape} and returned {given}")
    return out


def _towards(roots: Sequence[Tensor], wanted: set[Any]) -> dict[Node, list[bool]]:
    """For each node with a wanted tensor behind it: which of its inputs lead there."""
    nodes: dict[Node, None] = {}
    stack = [t._node for t in roots if t._node is not None]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes[node] = None
            stack.extend(e[0] for e in node.edges if isinstance(e, tuple))
    useful: dict[Node, list[bool]] = {}
    for node in sorted(nodes, key=lambda n: n.seq):  # inputs before what uses them
        leads = []
        for e in node.edges:
            if isinstance(e, tuple):
                leads.append(e[0] in useful or (e[0].seq, e[1]) in wanted)
            else:
                leads.append(e is not None and id(e) in wanted)
        if any(leads):
            useful[node] = leads
    return useful


def _seed(t: Tensor, gradient: Any, who: str) -> Tensor:
    if not t.requires_grad:
        raise AutogradError(
            f"{who}: the tensor of shape {t.shape} has no gradient history; some input must have requires_grad=True and no_grad must be off"
        )
    if gradient is None:
        if t.size != 1:
            raise AutogradError(
                f"{who}: only a one-element tensor has an implied gradient of 1, and this has shape {t.shape}; "
                "reduce it (for example .sum()) or pass gradient="
            )
        return ones_like(t)
    if not isinstance(gradient, Tensor):
        raise AutogradError(f"{who}: the gradient to start from is of type {type(gradient).__name__}; make it a Tensor of shape {t.shape}")
    if gradient.shape != t.shape:
        raise ShapeError(f"{who}: gradient has shape {gradient.shape} and the tensor {t.shape}; they must be equal")
    return gradient.to(dtype=t.dtype)


def backward(root: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Add d(root)/d(leaf) into `.grad` of every leaf with `requires_grad` that `root` depends on.

    Saved tensors are freed on the way unless `retain_graph`. With `create_graph` the gradients are themselves
    differentiable. Raises AutogradError when there is no graph, the graph was freed, or a start value is needed.
    """
    _run([root], [_seed(root, gradient, "backward")], None, retain_graph, create_graph)


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> Any:
    """d(outputs)/d(inputs) without touching `.grad`: one Tensor per input, in the form `inputs` was given.

    `grad_outputs` are the gradients to start from (1 for one-element outputs). An input that the outputs do not depend
    on raises AutogradError, or gives None with `allow_unused`.
    """
    single = isinstance(inputs, Tensor)
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    starts = [grad_outputs] * len(outs) if grad_outputs is None or isinstance(grad_outputs, Tensor) else list(grad_outputs)
    if len(starts) != len(outs):
        raise AutogradError(f"grad: there are {len(outs)} outputs and {len(starts)} grad_outputs; give one, or None, for each")
    seeds = [_seed(o, g, "grad") for o, g in zip(outs, starts, strict=True)]
    keys: list[Any] = [id(t) if t._node is None else (t._node.seq, t._index) for t in ins]
    retain = create_graph if retain_graph is None else retain_graph
    found = _run(outs, seeds, set(keys), retain, create_graph)
    results = []
    for i, key in enumerate(keys):
        gradient = found.get(key)
        if gradient is None and not allow_unused:
            raise AutogradError(f"grad: the outputs do not depend on input {i}; pass allow_unused=True to get None for it")
        results.append(gradient)
    return results[0] if single else tuple(results)


def gradcheck(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    eps: float = 1e-6,
    atol: float = 1e-6,
    rtol: float = 1e-5,
) -> bool:
    """True when `fn`'s gradients agree with central differences; else AutogradError with the worst element.

    `fn` takes `inputs` (float64 tensors; those that require a gradient are checked) and returns a tensor or a tuple.
    """
    names = [i for i, t in enumerate(inputs) if t.requires_grad]
    if not names:
        raise AutogradError("gradcheck: no input requires a gradient; call requires_grad_() on those to check")
    for i in names:
        if inputs[i].dtype.name != "float64":
            raise AutogradError(f"gradcheck: input {i} is {inputs[i].dtype.name}; differences of size {eps} need float64 inputs")

    def outputs(values: Sequence[Tensor]) -> list[Tensor]:
        out = fn(*values)
        return [o for o in (out if isinstance(out, tuple) else (out,)) if o.dtype.is_floating]

    rng = np.random.default_rng(0)
    outs = outputs(inputs)
    weights = [rng.standard_normal(o.shape) for o in outs]
    from tilewright.tensor import tensor

    live = [(o, tensor(w, device=o.device)) for o, w in zip(outs, weights, strict=True) if o.requires_grad]
    if not live:
        raise AutogradError("gradcheck: no output depends on the inputs that require a gradient")
    analytic = grad([o for o, _ in live], [inputs[i] for i in names], [w for _, w in live], allow_unused=True)
    base = [t.numpy().copy() for t in inputs]

    def value(changed: int, array: np.ndarray) -> float:
        fresh = [
            tensor(array if i == changed else b, device=t.device, layout=t.layout, requires_grad=t.requires_grad)
            for i, (b, t) in enumerate(zip(base, inputs, strict=True))
        ]
        return float(sum(np.sum(o.numpy() * w) for o, w in zip(outputs(fresh), weights, strict=True)))

    for i, gradient in zip(names, analytic, strict=True):
        got = np.zeros(inputs[i].shape) if gradient is None else gradient.numpy()
        if got.shape != inputs[i].shape:
            raise AutogradError(f"gradcheck: input {i} has shape {inputs[i].shape} and its gradient {got.shape}")
        for where in np.ndindex(*inputs[i].shape):
            up, down = base[i].copy(), base[i].copy()
            up[where] += eps
            down[where] -= eps
            expected = (value(i, up) - value(i, down)) / (2 * eps)
            if not abs(got[where] - expected) <= atol + rtol * abs(expected):
                raise AutogradError(f"gradcheck: input {i} at {where}: the gradient is {got[where]:.8g} and differences give {expected:.8g}")
    return True
