"""Deferred weight gradients: backward computes input gradients now and weight gradients later.

A pipeline stage can send its input gradient on before it computes the gradients of its weights,
which nobody waits for ("Zero Bubble Pipeline Parallelism", Qi et al. 2023, arXiv:2401.10241).
Instead of cutting the autograd graph in two, layers hand the second half of their backward to a
queue: inside `WeightGradQueue.defer` it is stored, outside it is computed at once.

Note [Order of accumulation]. `flush` adds up the gradients of one parameter in the order in which
backward met them, then accumulates that sum into `param.grad`, as autograd does. Flushing the keys
in ascending order of microbatch therefore gives the same bits as an ordinary backward per
microbatch in that order.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_platform._internals import version_of

Compute = Callable[[], Tensor]
X = TypeVar("X", Tensor, Tensor | None)


@dataclass(frozen=True, slots=True)
class _Entry:
    param: Tensor
    compute: Compute


class _Active(threading.local):
    """Where backwards of this thread put their weight gradients.

    Set for each thread, as `torch.compile` does not see what takes the place of a class's default.
    """

    def __init__(self) -> None:
        self.entries: deque[_Entry] | None = None


_active = _Active()


class WeightGradQueue:
    """Weight gradients that were put off, by key. Safe to use from several threads."""

    __slots__ = ("_deferring", "_entries", "_lock")

    def __init__(self) -> None:
        self._entries: dict[Hashable, deque[_Entry]] = {}
        self._deferring: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Queue under `key` the weight gradients of the backwards that run inside, in this thread.

        Also keeps those backwards in this thread on CUDA, where the autograd engine would use one
        of its own. What was queued stays queued if the context is left by an exception.

        Args:
            key: Key of the queue, for example `(stage_index, microbatch_index)`; using it again
                adds to it.
        """
        with self._lock:
            entries = self._entries.setdefault(key, deque())
            self._deferring[key] += 1
        outer, _active.entries = _active.entries, entries
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            _active.entries = outer
            with self._lock:
                self._deferring[key] -= 1

    def flush(self, key: Hashable) -> int:
        """Compute what is queued under `key` and accumulate it into the `grad` of the parameters.

        Accumulates through autograd, so that hooks of the parameters run
        (Note [Order of accumulation]). torch has called them once before, in the backward that left
        the gradient out: with None, and with `param.grad` as it was.

        Returns:
            How many gradients were computed; 0 for a key that is not known.
        """
        with self._lock:
            entries = self._entries.get(key, deque())
            if not self._deferring[key]:
                self._entries.pop(key, None)
                del self._deferring[key]
            by_param = _taken(entries)
        done = sum(map(len, by_param.values()))
        with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
            while by_param:
                _accumulate(by_param.pop(next(iter(by_param))))
        return done

    def discard(self, key: Hashable) -> None:
        """Forget what is queued under `key`, for example after an error; unknown keys are fine."""
        with self._lock:
            self._entries.pop(key, None)

    def pending(self) -> int:
        """Return how many weight gradients are queued, over all keys."""
        with self._lock:
            return sum(len(entries) for entries in self._entries.values())


def submit_weight_grad(param: Tensor, compute: Compute) -> Tensor | None:
    """Put off the gradient of `param`, or compute it; for backward of custom autograd Functions.

    Return the result to autograd. Keep the parameter itself as an attribute of `ctx`: what
    `ctx.saved_tensors` returns under activation checkpointing is a detached copy of it.

    Args:
        param: The parameter as it was passed to the Function.
        compute: Called once, now or in `flush`, without grad mode then. It should hold detached
            tensors only, or it keeps the graph alive.

    Returns:
        None if it was queued, else the gradient: outside `defer`, for a `param` that is not a leaf
        that requires grad, with `create_graph=True`, and while compiling.
    """
    return None if put_off_weight_grad(param, compute) else compute()


def put_off_weight_grad(param: Tensor, compute: Compute) -> bool:
    """Put off the gradient of `param` where `submit_weight_grad` would; compute nothing now.

    For a backward that computes gradients in another way if it does so at once.

    Args:
        param: Same as of `submit_weight_grad`.
        compute: Called once, in `flush`, if it was queued.

    Returns:
        Whether it was.
    """
    entries = _active.entries
    if entries is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if not (param.is_leaf and param.requires_grad):
        return False
    entries.append(_Entry(param, compute))
    return True


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    cast: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` whose weight and bias gradients can be put off.

    The same bits as the original, deferred or not; under autocast, gradients of several uses are
    added in the dtype of the parameter instead of the autocast dtype.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.
        dtype: Dtype of the computation, autocast or not; as wide as that of `x` or wider. Backward
            keeps `x` as it is: a product in fp32 of bf16 rows keeps no fp32 copy of them.
        cast: `weight` in the dtype of `x`, which is narrower: made before, for many calls. It is
            computed with in place of `weight`, whose gradient is added up in the dtype of `weight`.

    Returns:
        `[..., out]`, of `dtype` if it is given.
    """
    if dtype is not None and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, weight, bias, dtype=dtype, cast=cast)
    if torch.compiler.is_compiling():
        if cast is not None:
            dtype = cast.dtype  # a compiler places casts as it likes
        return F.linear(_cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype))
    y: Tensor = _Linear.apply(x, weight, bias, (dtype, cast))
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        computed_in: tuple[torch.dtype | None, Tensor | None],
    ) -> Tensor:
        ctx.input_dtype, ctx.params = x.dtype, (weight, bias)
        dtype, cast = computed_in
        if cast is not None:
            weight, dtype = cast, cast.dtype
        if dtype is None:
            dtype = _autocast_dtype(x)
            x = _cast(x, dtype)
        elif x.dtype == weight.dtype == dtype and (bias is None or bias.dtype == dtype):
            dtype = None
        ctx.compute_dtype = dtype
        ctx.save_for_backward(x, weight)
        if dtype is None:
            return F.linear(x, weight, bias)
        return F.linear(_cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype))

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, saved_weight = ctx.saved_tensors
        weight, bias = ctx.params
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0] and ctx.compute_dtype is None:
            grad_x = grad.matmul(saved_weight)
        elif ctx.needs_input_grad[0]:
            grad_x = _cast(grad.matmul(_cast(saved_weight, ctx.compute_dtype)), ctx.input_dtype)
        if not torch.is_grad_enabled():
            x, grad = x.detach(), grad.detach()
        if ctx.needs_input_grad[1]:
            compute = partial(_weight_grad, grad, x, weight.dtype, version_of(x))
            grad_weight = submit_weight_grad(weight, compute)
        if ctx.needs_input_grad[2]:
            grad_bias = submit_weight_grad(bias, partial(_bias_grad, grad, bias.dtype))
        return grad_x, grad_weight, grad_bias, None


def _taken(entries: deque[_Entry]) -> dict[int, list[_Entry]]:
    """Take what is queued now, by parameter: the queue keeps none of it alive."""
    by_param: dict[int, list[_Entry]] = {}
    for _ in range(len(entries)):
        entry = entries.popleft()  # one step each: another thread may append meanwhile
        by_param.setdefault(id(entry.param), []).append(entry)
    return by_param


def _accumulate(entries: list[_Entry]) -> None:
    param = entries[0].param
    total = entries.pop(0).compute()
    while entries:
        total = total + entries.pop(0).compute()
    torch.autograd.backward(param, total)


def _weight_grad(grad: Tensor, x: Tensor, dtype: torch.dtype, version: int) -> Tensor:
    if version_of(x) != version:
        raise RuntimeError(
            f"version of x ({version_of(x)}) must equal that in backward ({version}): the input of "
            "a linear was written before its weight gradient was computed"
        )
    rows_grad = grad.reshape(-1, grad.shape[-1])
    return rows_grad.t().mm(x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(dtype)


def _bias_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0).to(dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(x: X, dtype: torch.dtype | None) -> X:
    # Autocast leaves float64 alone.
    return x if x is None or dtype is None or x.dtype == torch.float64 else x.to(dtype)
