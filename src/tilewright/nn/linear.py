"""Fully connected and embedding layers."""

from __future__ import annotations

import math

from tilewright.nn import init
from tilewright.nn.module import Module, Parameter
from tilewright.ops.embedding import embedding
from tilewright.ops.matmul import linear
from tilewright.tensor import Tensor, empty


class Linear(Module):
    """(..., in) to (..., out), with an activation where the call gives one; see `tilewright.linear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(empty(out_features, in_features))
        self.bias = Parameter(empty(out_features)) if bias else None
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(max(in_features, 1))
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, activation: str | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, activation=activation)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """Rows of a table at integer positions; see `tilewright.embedding`."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter(empty(num_embeddings, embedding_dim))
        init.normal_(self.weight)

    def forward(self, index: Tensor) -> Tensor:
        return embedding(index, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
