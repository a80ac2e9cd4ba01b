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
    if t is None:
        return None
    stamp = t.buffer.stamp
    return stamp, stamp.version


def folded(conv: Any, bn: Any) -> tuple[Tensor, Tensor]:
    """The convolution's weight and bias with the batch norm's running statistics in them."""
    d = bn.__dict__
    weight, bias = conv.weight, conv.bias
    key = tuple([_version(t) for t in (weight, bias, d["weight"], d["bias"], d["running_mean"], d["running_var"])])
    held = d.get("_folded")
    if held is not None and held[0] == key and held[1] is conv:
        return held[2]
    scale = 1.0 / np.sqrt(d["running_var"].numpy().astype(np.float64) + d["eps"])
    if d["weight"] is not None:
        scale = scale * d["weight"].numpy()
    shift = -d["running_mean"].numpy() * scale
    if bias is not None:
        shift = shift + bias.numpy() * scale
    if d["bias"] is not None:
        shift = shift + d["bias"].numpy()
    w = weight.numpy() * scale.reshape(-1, 1, 1, 1)
    made = (tensor(w, weight.dtype, weight.device, layout=weight.layout), tensor(shift, weight.dtype, weight.device))
    d["_folded"] = (key, conv, made)
    return made


def conv_bn_act(conv: Any, bn: Any, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """activation(bn(conv(x)) + residual), in one kernel where no gradient is wanted and bn is in evaluation."""
    b = bn.__dict__
    plain = not b["training"] and b["running_mean"] is not None and not conv._hooks and not b["_hooks"] and x.device.kind == "cpu"
    if plain and not (mode.enabled and (x.requires_grad or conv.weight.requires_grad)):
        weight, bias = folded(conv, bn)
        return conv2d(
            x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups, residual=residual, activation=activation
        )  # fmt: skip
    y = conv(x)
    if residual is None:
        return bn(y, activation=activation)
    y = bn(y) + residual
    return y if activation is None else activate(y, activation)
