"""Hooks of autograd, functions outside compiled graphs, and deferred weight gradients.

`Context` is the type of the context of a Function; `differentiable_once` is for backwards that run
once.

Backward computes input gradients now and weight gradients later where a layer asks for it, so that
a pipeline stage can send its input gradient before it computes the gradients of its weights, for
which no other stage waits ("Zero Bubble Pipeline Parallelism", Qi et al. 2023, arXiv:2401.10241).
Instead of cutting the autograd graph in two, layers give the second half of their backward to a
queue: inside `WeightGradQueue.defer` the queue stores it, outside it is computed at once.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_platform import _internals

P = ParamSpec("P")
R = TypeVar("R")
Hook = Callable[[], None]


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function, and all that it calls, from compiled graphs: one break for each call.

    Use it for code that cannot be compiled, such as reads of sizes on the host, to choose where
    graphs break. It works like `torch.compiler.disable`, but a program that compiles nothing does
    not import the compiler, which takes seconds.

    Args:
        function: Function or method.
    """
    uncompiled = _internals.dynamo_disabled(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (uncompiled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    # torch counts compilations by code object, and stops at eight: each function needs its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return wraps(function)(call)


class _SyncHook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Hook | None, backward: Hook | None) -> Tensor:
        ctx.hook = backward
        if forward is not None:
            forward()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.hook is not None:
            ctx.hook()
        return grad, None, None


@outside_graph
def sync_hook(x: Tensor, *, forward: Hook | None = None, backward: Hook | None = None) -> Tensor:
    """Return `x` unchanged; call `forward` now and `backward` when the gradient of `x` arrives.

    Nothing reads the tensor, so that the result of a pending collective stays pending. Without a
    gradient (`x` does not require grad, or grad mode is off) only `forward` is called. A compiled
    region breaks its graph here.

    Args:
        x: Any tensor.
        forward: Function that is called before `sync_hook` returns.
        backward: Function that is called in each backward pass, in the thread that runs this node.
    """
    y: Tensor = _SyncHook.apply(x, forward, backward)
    return y


Compute = Callable[[], Tensor]
X = TypeVar("X", Tensor, Tensor | None)


@dataclass(frozen=True, slots=True)
class _Entry:
    param: Tensor
    compute: Compute


class _Active(threading.local):
    """Queue for the weight gradients of backward passes in this thread.

    Every thread sets the attribute, since `torch.compile` misses a change of a class's default.
    """

    def __init__(self) -> None:
        self.entries: deque[_Entry] | None = None


_active = _Active()


class WeightGradQueue:
    """Deferred weight gradients, by key. Several threads may use it."""

    __slots__ = ("_deferring", "_entries", "_lock")

    def __init__(self) -> None:
        self._entries: dict[Hashable, deque[_Entry]] = {}
        self._deferring: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Queue weight gradients of this thread's backward passes under `key` inside the context.

        On CUDA the passes then run in this thread and not in a thread of the autograd engine. The
        queue keeps its entries if an exception leaves the context.

        Args:
            key: Key of the entries, for example `(stage_index, microbatch_index)`; a second use of
                a key adds entries.
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
        """Compute the gradients under `key` and accumulate them into the `grad` of the parameters.

        Gradients are accumulated through autograd, so that hooks of the parameters run. torch has
        called the hooks once before, in the backward that left the gradient out, with None and an
        unchanged `param.grad`.

        `flush` adds up the gradients of one parameter in the order in which backward met them, then
        accumulates that sum into `param.grad`, as autograd does. Flushing the keys in ascending
        order of microbatch therefore gives the same bits as an ordinary backward per microbatch in
        that order.

        Returns:
            Number of gradients that were computed; 0 for an unknown key.
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
        """Drop the entries under `key`, for example after an error; unknown keys are allowed."""
        with self._lock:
            self._entries.pop(key, None)

    def pending(self) -> int:
        """Count the queued weight gradients of all keys."""
        with self._lock:
            return sum(len(entries) for entries in self._entries.values())


def submit_weight_grad(param: Tensor, compute: Compute) -> Tensor | None:
    """Defer the gradient of `param`, or compute it; for backward of custom autograd Functions.

    Return the result to autograd. Store the parameter itself as an attribute of `ctx`, because
    `ctx.saved_tensors` returns a detached copy under activation checkpointing.

    Args:
        param: Parameter that was passed to the Function.
        compute: Function that returns the gradient; called once, now or in `flush` without grad
            mode. It should refer to detached tensors only, or it keeps the graph alive.

    Returns:
        None if the gradient was queued. The gradient itself outside `defer`, for a `param` that is
        no leaf or does not require grad, with `create_graph=True`, and while compiling.
    """
    return None if put_off_weight_grad(param, compute) else compute()


def put_off_weight_grad(param: Tensor, compute: Compute) -> bool:
    """Defer the gradient of `param` where `submit_weight_grad` would; compute nothing now.

    Use it in a backward that computes immediate gradients in another way than deferred ones.

    Args:
        param: Parameter, as in `submit_weight_grad`.
        compute: Function that returns the gradient; called once, in `flush`, if it was queued.

    Returns:
        True if the gradient was queued.
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
    """Apply `torch.nn.functional.linear` so that its weight and bias gradients can be deferred.

    Results are bitwise those of the original, deferred or not, with one difference: under autocast,
    gradients of several uses are added in the dtype of the parameter and not the autocast dtype.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.
        dtype: Dtype of the computation, also under autocast; as wide as the dtype of `x` or wider.
            Backward saves `x` itself: an fp32 product of bf16 rows saves no fp32 copy of the rows.
        cast: `weight` in the narrower dtype of `x`, cast once for many calls. The product uses
            `cast` instead of `weight`; the gradient is summed in the dtype of `weight`.

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
            dtype = autocast_dtype(x) if torch.is_autocast_enabled(x.device.type) else None
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
            compute = partial(_weight_grad, grad, x, weight.dtype, _internals.version_of(x))
            grad_weight = submit_weight_grad(weight, compute)
        if ctx.needs_input_grad[2]:
            grad_bias = submit_weight_grad(bias, partial(_bias_grad, grad, bias.dtype))
        return grad_x, grad_weight, grad_bias, None


def _taken(entries: deque[_Entry]) -> dict[int, list[_Entry]]:
    """Remove the entries that are queued now, and return them by parameter."""
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
    if _internals.version_of(x) != version:
        raise RuntimeError(
            f"version of x ({_internals.version_of(x)}) must equal that in backward ({version}): "
            "the input of a linear was written before its weight gradient was computed"
        )
    rows_grad = grad.reshape(-1, grad.shape[-1])
    return rows_grad.t().mm(x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(dtype)


def _bias_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).sum(0).to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of `x` are computed, under `torch.autocast` or not."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _cast(x: X, dtype: torch.dtype | None) -> X:
    # Autocast leaves float64 alone.
    return x if x is None or dtype is None or x.dtype == torch.float64 else x.to(dtype)


ContextT = TypeVar("ContextT")


class Context(Protocol):
    """The context that autograd passes to forward and backward of a Function.

    A Function that keeps more than tensors names it in a subclass.
    """

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and outputs for `saved_tensors` of the backward."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether a gradient that does not exist is zeros or None."""


def differentiable_once(
    backward: Callable[[ContextT, Tensor], R],
) -> Callable[[ContextT, Tensor], R]:
    """Make a backward refuse second derivatives, also of sums, whose gradient is a constant.

    torch's `once_differentiable` lets a backward of such a gradient return constants.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: ContextT, grad: Tensor) -> R:
        if torch.is_grad_enabled():
            grad = grad.detach().requires_grad_()
        return once(ctx, grad)

    return refusing
