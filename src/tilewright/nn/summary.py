"""What a model holds and costs, layer by layer, without running it: its forward runs on the null device."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.autograd import no_grad
from tilewright.devices.null import NullDevice
from tilewright.nn.module import Module
from tilewright.tensor import Tensor, empty


@dataclass
class Row:
    """One layer, or what a module computes beside its layers: path, kind, output shape (None unless it is one tensor),
    parameters, floating-point operations, and bytes of the tensors that its ops return."""

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    flops: float
    activation_bytes: int


@dataclass
class Summary:
    """`rows` in the order in which they finished, and the totals."""

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
    """Shapes, parameters, FLOPs (a multiply-add counts two) and activation memory of inference on one input of that shape."""
    out = Summary()
    for p in model.parameters():
        out.parameters += p.size
        out.parameter_bytes += p.nbytes
        out.trainable += p.size if p.requires_grad else 0
    null = NullDevice("null")  # our own, so that nobody else's calls are counted
    ledger = _Ledger()
    null.plans = ledger  # type: ignore[assignment]
    twin = _twin(model, null)
    for name, module in twin.named_modules():
        module.__dict__["_hooks"] = ()
        module.__dict__["forward"] = _watched(name, module, ledger, out.rows)
    with no_grad():
        twin(empty(*input_shape, dtype=dtype, device=null, layout="channels_last" if len(input_shape) == 4 else "contiguous"))
    out.flops = sum(r.flops for r in out.rows)
    out.activation_bytes = sum(r.activation_bytes for r in out.rows)
    return out


def _watched(name: str, module: Module, ledger: _Ledger, rows: list[Row]) -> Any:
    """The module's forward, which also writes its row: what its ops cost less what its children's rows hold already."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        flops, held, start = ledger.flops, ledger.bytes, len(rows)
        result = forward(*args, **kwargs)
        flops = ledger.flops - flops - sum(r.flops for r in rows[start:])
        held = ledger.bytes - held - sum(r.activation_bytes for r in rows[start:])
        if not module._modules or flops or held:
            shape = result.shape if isinstance(result, Tensor) else None
            rows.append(Row(name, type(module).__name__, shape, sum(p.size for p in module._parameters.values()), flops, held))
        return result

    return run


class _Ledger:
    """Stands in for a device's plans: keeps none, so that every call makes its own, and adds up what they cost."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.bytes = 0

    def get(self, key: Any) -> None:
        return None

    def put(self, key: Any, plan: Any) -> None:
        self.flops += plan.op.cost(plan.problem.attrs, *plan.problem.inputs).flops
        self.bytes += sum(s.nbytes for s in plan.out_specs)


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
    return copy.deepcopy(model, memo).eval()
