"""Convolution, batch norm and activation as one step.

In evaluation without gradients the batch norm is folded into the convolution's weights (Jacob et al., 2018, section
3.2), so that all of it, residual included, is one kernel. The modules' own parameters are never changed: the folded
weights are kept beside them, and made again when any of the values they came from changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.autograd import mode
from tilewright.ops.conv2d import conv2d
from tilewright.ops.pointwise import activate
from tilewright.tensor import Tensor, tensor


def _version(t: Tensor | None) -> Any:
    return None if t is None else (t.buffer, t.buffer.stamp.version)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def folded(conv: Any, bn: Any) -> tuple[Tensor, Tensor]:
    """The convolution's weight and bias with the batch norm's running statistics in them."""
    d = bn.__dict__
    weight, bias = conv.weight, conv.bias
    sources = (weight, bias, d["weight"], d["bias"], d["running_mean"], d["running_var"])
    key = (d["eps"], *[_version(t) for t in sources])
    held = d.get("_folded")
    if held is not None and held[0] == key:
        return held[1]
    w, b, gamma, beta, mean, var = (None if t is None else t.numpy().astype(np.float64) for t in sources)
    scale = 1.0 / np.sqrt(var + d["eps"])  # type: ignore[operator]
    scale = scale if gamma is None else scale * gamma
    shift = (-mean if b is None else b - mean) * scale  # type: ignore[operator]
    shift = shift if beta is None else shift + beta
    w = w * scale.reshape(-1, 1, 1, 1)  # type: ignore[operator]
    made = (tensor(w, weight.dtype, weight.device, layout=weight.layout), tensor(shift, weight.dtype, weight.device))
    d["_folded"] = (key, made)
    return made


def conv_bn_act(conv: Any, bn: Any, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """activation(bn(conv(x)) + residual), in one kernel where no gradient is wanted and bn is in evaluation.

    conv: a Conv2d, bn: a BatchNorm2d; either's forward hooks see the values they would see apart.
    """
    b, c = bn.__dict__, conv.__dict__
    if (
        not b["training"] and b["running_mean"] is not None and not b["_hooks"] and not c["_hooks"] and x.device.kind != "null"
        and not (mode.enabled and _wants_gradient(x, c["weight"], c["bias"], b["weight"], b["bias"], residual))
    ):  # fmt: skip
        weight, bias = folded(conv, bn)
        return conv2d(
            x, weight, bias, c["stride"], c["padding"], c["dilation"], c["groups"], residual=residual, activation=activation
        )  # fmt: skip
    y = conv(x)
    if residual is None:
        return bn(y, activation=activation)
    y = bn(y) + residual
    return y if activation is None else activate(y, activation)
