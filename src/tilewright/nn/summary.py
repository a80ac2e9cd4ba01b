"""What a model holds and costs, layer by layer, without running it: its forward runs on the null device."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright import devices
from tilewright.autograd import no_grad
from tilewright.nn.module import Module
from tilewright.tensor import Tensor, empty


@dataclass
class Row:
    """One layer: its path and kind, output shape, parameters, floating-point operations and bytes of activations."""

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    flops: float
    activation_bytes: int


@dataclass
class Summary:
    """`rows` for the leaf layers in the order they ran, and the totals."""

    rows: list[Row] = field(default_factory=list)
    parameters: int = 0
    trainable: int = 0
    flops: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'layer':36s} {'kind':20s} {'output':>20s} {'parameters':>12s} {'MFLOP':>10s} {'activations MB':>15s}"]
        for r in self.rows:
            shape = "x".join(map(str, r.output)) if r.output else ""
            lines.append(
                f"{r.name[-36:]:36s} {r.kind[:20]:20s} {shape:>20s} {r.parameters:12,d} {r.flops / 1e6:10.2f} {r.activation_bytes / 1e6:15.2f}"
            )
        lines.append(
            f"parameters {self.parameters:,d} ({self.trainable:,d} trainable, {self.parameter_bytes / 1e6:.2f} MB), "
            f"{self.flops / 1e9:.3f} GFLOP, activations {self.activation_bytes / 1e6:.2f} MB"
        )
        return "\n".join(lines)


def summary(model: Module, input_shape: tuple[int, ...], dtype: Any = "float32") -> Summary:
    """Shapes, parameters, FLOPs (a multiply-add counts two) and activation memory for one input of that shape."""
    out = Summary()
    for p in model.parameters():
        out.parameters += p.size
        out.parameter_bytes += p.nbytes
        out.trainable += p.size if p.requires_grad else 0
    null = devices.get("null")
    twin = _twin(model, null)
    costs: list[Any] = []

    def enter(name: str) -> Any:
        def hook(module: Module, args: Any, result: Any) -> None:
            flops = sum(c.flops for c in costs)
            costs.clear()
            own = sum(p.size for p in module._parameters.values())
            shape = result.shape if isinstance(result, Tensor) else None
            size = result.nbytes if isinstance(result, Tensor) else 0
            out.rows.append(Row(name, type(module).__name__, shape, own, flops, size))

        return hook

    leaves = {id(m) for m in twin.modules() if not m._modules}
    removers = [m.register_forward_hook(enter(n)) for n, m in twin.named_modules() if id(m) in leaves]
    held, null.plans = null.plans, _Count(costs)  # type: ignore[assignment]
    try:
        with no_grad():
            twin(empty(*input_shape, dtype=dtype, device=null, layout="channels_last" if len(input_shape) == 4 else "contiguous"))
    finally:
        null.plans = held
        for remove in removers:
            remove()
    rest = sum(c.flops for c in costs)
    out.flops = sum(r.flops for r in out.rows) + rest
    out.activation_bytes = sum(r.activation_bytes for r in out.rows)
    return out


class _Count:
    """Stands in for a device's plans: keeps none, so that every call makes its own, and adds up what they cost."""

    def __init__(self, costs: list[Any]) -> None:
        self.costs = costs

    def get(self, key: Any) -> None:
        return None

    def put(self, key: Any, plan: Any) -> None:
        self.costs.append(plan.op.cost(plan.problem.attrs, *plan.problem.inputs))


def _twin(model: Module, null: Any) -> Module:
    """The same tree with tensors of the same specs on the null device."""
    memo: dict[int, Any] = {}
    for store in ("_parameters", "_buffers"):
        for m in model.modules():
            for v in m.__dict__[store].values():
                if v is not None:
                    t: Tensor = object.__new__(type(v))
                    Tensor.__init__(t, null.allocate(v.nbytes), v.spec, null)
                    t.requires_grad = v.requires_grad
                    memo[id(v)] = t
    for m in model.modules():
        m.__dict__.pop("_folded", None)
    return copy.deepcopy(model, memo).eval()
