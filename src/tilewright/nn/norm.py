"""Normalisation layers."""

from __future__ import annotations

from typing import Any

from tilewright.nn.module import Module, Parameter
from tilewright.ops.norm import batch_norm, group_norm, instance_norm, layer_norm
from tilewright.tensor import Tensor, full, ones, zeros


class BatchNorm2d(Module):
    """Per channel of (N, C, H, W); see `tilewright.batch_norm`. momentum None averages over all batches seen.

    activation: "relu" and the like, fused where a kernel can.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = Parameter(ones(num_features)) if affine else None
        self.bias = Parameter(zeros(num_features)) if affine else None
        self.register_buffer("running_mean", zeros(num_features) if track_running_stats else None)
        self.register_buffer("running_var", ones(num_features) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", full((), 0, dtype="int64") if track_running_stats else None)

    def forward(self, x: Tensor, activation: str | None = None) -> Tensor:
        d = self.__dict__
        momentum = d["momentum"]
        training = d["training"] or d["running_mean"] is None
        if training and d["num_batches_tracked"] is not None and d["training"] and x.device.kind == "cpu":
            count = d["num_batches_tracked"].numpy(writable=True)
            count += 1
            if momentum is None:
                momentum = 1.0 / float(count)
        return batch_norm(
            x, d["running_mean"], d["running_var"], d["weight"], d["bias"], training, momentum or 0.0, d["eps"], activation=activation
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(BatchNorm2d):
    """Per channel of (N, C) or (N, C, L); see `tilewright.batch_norm`."""


class LayerNorm(Module):
    """Over the last axes; see `tilewright.layer_norm`."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Parameter(ones(self.normalized_shape)) if elementwise_affine else None
        self.bias = Parameter(zeros(self.normalized_shape)) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class GroupNorm(Module):
    """Over each sample's channels in groups; see `tilewright.group_norm`."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Parameter(ones(num_channels)) if affine else None
        self.bias = Parameter(zeros(num_channels)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class InstanceNorm2d(Module):
    """Over each sample's channel; see `tilewright.instance_norm`."""

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.weight = Parameter(ones(num_features)) if affine else None
        self.bias = Parameter(zeros(num_features)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return instance_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"
