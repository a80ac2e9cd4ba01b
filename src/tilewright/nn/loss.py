"""Losses as layers: each is the op of the same name with its options fixed."""

from __future__ import annotations

from typing import Any

from tilewright.nn.module import Module
from tilewright.ops import loss as ops
from tilewright.tensor import Tensor


class _Loss(Module):
    fn: Any

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
        self.tensors = tuple(k for k, v in options.items() if isinstance(v, Tensor))
        for name in self.tensors:  # so that class weights move with the module
            self.register_buffer(name, options[name])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return type(self).fn(x, target, **self.options, **{k: getattr(self, k) for k in self.tensors})


class CrossEntropyLoss(_Loss):
    """`tilewright.cross_entropy`."""

    fn = staticmethod(ops.cross_entropy)


class NLLLoss(_Loss):
    """`tilewright.nll_loss`."""

    fn = staticmethod(ops.nll_loss)


class BCEWithLogitsLoss(_Loss):
    """`tilewright.bce_with_logits`."""

    fn = staticmethod(ops.bce_with_logits)


class MSELoss(_Loss):
    """`tilewright.mse_loss`."""

    fn = staticmethod(ops.mse_loss)


class L1Loss(_Loss):
    """`tilewright.l1_loss`."""

    fn = staticmethod(ops.l1_loss)


class SmoothL1Loss(_Loss):
    """`tilewright.smooth_l1_loss`."""

    fn = staticmethod(ops.smooth_l1_loss)


class HuberLoss(_Loss):
    """`tilewright.huber_loss`."""

    fn = staticmethod(ops.huber_loss)


class KLDivLoss(_Loss):
    """`tilewright.kl_div`."""

    fn = staticmethod(ops.kl_div)
