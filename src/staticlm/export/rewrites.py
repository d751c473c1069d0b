"""Trace-time rewrites of operations that would fall out of a delegate, each with the same values.

They act on function calls while the model is traced (a `TorchFunctionMode`), so that no modelling code
changes. What falls out and why is measured: see `docs/decisions/0002-trace-time-rewrites.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from staticlm.export.constants import Constants

_Handler = Callable[..., Any]


class Rewrites(TorchFunctionMode):
    """Replace calls by equal ones that delegates take."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.constants = constants

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(self.constants, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _last(x: Tensor, dim: Any) -> bool:
    if isinstance(dim, (tuple, list)):
        if len(dim) != 1:
            return False
        dim = dim[0]
    return isinstance(dim, int) and dim in (-1, x.dim() - 1)


def _row_mean(constants: Constants, x: Tensor) -> Tensor:
    """Mean over the last dimension, kept: a linear layer with a constant averaging row."""
    width = x.shape[-1]
    name = f"average_{width}_{str(x.dtype).removeprefix('torch.')}"
    row = constants.get(name, lambda: torch.full((1, width), 1.0 / width, dtype=x.dtype))
    return torch.nn.functional.linear(x, row)


def _mean(
    constants: Constants, x: Tensor, dim: Any = None, keepdim: bool = False, **kw: Any
) -> Any:
    if (
        kw.get("dtype") not in (None, x.dtype)
        or not _is_float(x)
        or not _last(x, dim)
        or not keepdim
    ):
        return NotImplemented
    return _row_mean(constants, x)


def _unsqueeze(constants: Constants, x: Tensor, dim: int) -> Any:
    position = dim + x.dim() + 1 if dim < 0 else dim
    if not _is_float(x) or position == x.dim():
        return NotImplemented
    return x.reshape(*x.shape[:position], 1, *x.shape[position:])


def _layer_norm(
    constants: Constants,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *unused: Any,
) -> Any:
    if len(normalized_shape) != 1 or not _is_float(x):
        return NotImplemented
    centred = x - _row_mean(constants, x)
    out = centred * torch.rsqrt(_row_mean(constants, centred * centred) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _rms_norm(
    constants: Constants,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if len(normalized_shape) != 1 or not _is_float(x):
        return NotImplemented
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    out = x * torch.rsqrt(_row_mean(constants, x * x) + epsilon)
    return out if weight is None else out * weight


def _gelu(constants: Constants, x: Tensor, approximate: str = "none") -> Any:
    # XNNPACK computes the tanh form as the erf form (error 4.7e-4), so it is spelled out.
    if approximate != "tanh":
        return NotImplemented
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _pow(constants: Constants, x: Any, exponent: Any) -> Any:
    if not _is_float(x) or isinstance(exponent, (Tensor, bool)):
        return NotImplemented
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    return NotImplemented


def _cat(constants: Constants, tensors: Sequence[Tensor], dim: int = 0, **kw: Any) -> Any:
    # XNNPACK counts distinct inputs, so a tensor concatenated with itself falls out.
    if kw or len(tensors) != 2 or tensors[0] is not tensors[1] or not _is_float(tensors[0]):
        return NotImplemented
    x = tensors[0]
    if dim not in (-1, x.dim() - 1):
        return NotImplemented
    twice = constants.get(
        f"twice_{str(x.dtype).removeprefix('torch.')}", lambda: torch.ones((2, 1), dtype=x.dtype)
    )
    pair = x.reshape(*x.shape[:-1], 1, x.shape[-1]) * twice
    return pair.reshape(*x.shape[:-1], 2 * x.shape[-1])


def _split(constants: Constants, x: Tensor, size: Any, dim: int = 0) -> Any:
    axis = dim + x.dim() if dim < 0 else dim
    length = x.shape[axis]
    if isinstance(size, int):
        sizes = [min(size, length - start) for start in range(0, length, size)]
    else:
        sizes = list(size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(x.narrow(axis, start, n) for start, n in zip(starts, sizes, strict=True))


def _chunk(constants: Constants, x: Tensor, chunks: int, dim: int = 0) -> Any:
    axis = dim + x.dim() if dim < 0 else dim
    return _split(constants, x, -(-x.shape[axis] // chunks), axis)


def _to(constants: Constants, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    # A cast to what the tensor already is would be traced as a node.
    if len(args) == 1 and args[0] is x.dtype and not kwargs:
        return x
    if not args and set(kwargs) <= {"dtype", "device"}:
        same = (
            kwargs.get("dtype", x.dtype) is x.dtype and kwargs.get("device", x.device) == x.device
        )
        return x if same else NotImplemented
    return NotImplemented


def _getitem(constants: Constants, x: Tensor, index: Any) -> Any:
    # `x[:, 0:]` is x; traced, it is an alias that splits a delegate.
    items = index if isinstance(index, tuple) else (index,)
    whole = (slice(None), slice(0, None), Ellipsis)
    return (
        x
        if all(item in whole for item in items if isinstance(item, slice) or item is ...)
        and all(isinstance(item, slice) or item is ... for item in items)
        else NotImplemented
    )


def _float(constants: Constants, x: Tensor) -> Any:
    return x if x.dtype is torch.float32 else NotImplemented


def _embedding(
    constants: Constants,
    ids: Tensor,
    table: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *unused: Any,
    **kw: Any,
) -> Any:
    # The padding index concerns gradients only, and with one no quantised lookup is recognised.
    if padding_idx is None or max_norm is not None:
        return NotImplemented
    return torch.nn.functional.embedding(ids, table)


class _Complex:
    """A complex tensor as two real ones, for the few operations that rotary embeddings use."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real, self.imag = real, imag

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets torch's functions accept it; the mode has answered those that are known."""
        return NotImplemented

    @property
    def device(self) -> torch.device:
        return self.real.device

    def to(self, device: torch.device) -> _Complex:
        return self

    def unsqueeze(self, dim: int) -> _Complex:
        return _Complex(self.real.unsqueeze(dim), self.imag.unsqueeze(dim))

    def __getitem__(self, index: Any) -> _Complex:
        return _Complex(self.real[index], self.imag[index])

    def __mul__(self, other: Any) -> _Complex:
        if not isinstance(other, _Complex):
            return _Complex(self.real * other, self.imag * other)
        return _Complex(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )


def _polar(constants: Constants, length: Tensor, angle: Tensor) -> Any:
    return _Complex(length * torch.cos(angle), length * torch.sin(angle))


def _view_as_complex(constants: Constants, x: Tensor) -> Any:
    return _Complex(x[..., 0], x[..., 1])


def _view_as_real(constants: Constants, x: Any) -> Any:
    if not isinstance(x, _Complex):
        return NotImplemented
    parts = [part.reshape(*part.shape, 1) for part in (x.real, x.imag)]
    return torch.cat(parts, dim=-1)


_HANDLERS: dict[Any, _Handler] = {
    # No runtime here has complex tensors.
    torch.polar: _polar,
    torch.view_as_complex: _view_as_complex,
    torch.view_as_real: _view_as_real,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.to: _to,
    torch.Tensor.float: _float,
    torch.unsqueeze: _unsqueeze,
    torch.Tensor.unsqueeze: _unsqueeze,
    torch.layer_norm: _layer_norm,
    torch.nn.functional.layer_norm: _layer_norm,
    torch.rms_norm: _rms_norm,
    torch.nn.functional.rms_norm: _rms_norm,
    torch.nn.functional.gelu: _gelu,
    torch.nn.functional.embedding: _embedding,
    torch.pow: _pow,
    torch.Tensor.pow: _pow,
    torch.Tensor.__pow__: _pow,
    torch.cat: _cat,
    torch.split: _split,
    torch.Tensor.split: _split,
    torch.functional.split: _split,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
}
