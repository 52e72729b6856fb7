"""The backward of one microbatch in one stage, whole or in two parts, and layers for the parts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hp_platform import WeightGradQueue, linear

Grads = tuple[Tensor | None, ...]
"""One gradient per tensor; None where nothing reached it."""

WeightBackward = Callable[[], None]
"""Computes the weight gradients that were put off; called once."""


class BackwardSplitter(Protocol):
    """Splits a stage's backward in two. Keeps no state of a run, so any thread may call it."""

    def split_backward(
        self,
        module: nn.Module,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        inputs: Sequence[Tensor],
    ) -> tuple[Grads, WeightBackward]:
        """Run the part of the backward that the stage before waits for.

        Args:
            module: Module whose parameters get gradients, of which any part may be put off.
            outputs: Tensors that require grad, each with its graph.
            grads: Their gradients, as many.
            inputs: Inputs of the forward: leaves that require grad; may be empty.

        Returns:
            The gradients of the inputs, and a function that computes the weight gradients that were
            put off and accumulates them into the `grad` of the parameters.
        """


class DeferringSplitter:
    """Splits where layers hand their weight gradients to hp-platform's queue; the default.

    One backward runs, and every operation once: layers made of `hp_platform.linear` or
    `hp_platform.submit_weight_grad` put theirs off, all others compute theirs in the first part.
    """

    def split_backward(
        self,
        module: nn.Module,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        inputs: Sequence[Tensor],
    ) -> tuple[Grads, WeightBackward]:
        """Run the backward with the weight gradients of such layers put off."""
        del module
        queue = WeightGradQueue()
        with queue.defer(0):
            found = full_backward(outputs, grads, inputs=inputs)

        def finish() -> None:
            queue.flush(0)

        return found, finish


def nothing() -> None:
    """Do nothing: the second part of a backward that has put nothing off."""


def full_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], *, inputs: Sequence[Tensor]
) -> Grads:
    """Run the whole backward; parameter gradients accumulate.

    Args:
        outputs: Same as in `BackwardSplitter.split_backward`.
        grads: Their gradients, as many.
        inputs: Leaves that require grad.

    Returns:
        The gradients of the inputs, whose `grad` is None again.
    """
    if outputs:
        # In this thread, so that what is bound to it (deferred weight gradients) applies.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(list(outputs), list(grads))
    found = []
    for leaf in inputs:
        found.append(leaf.grad)
        leaf.grad = None
    return tuple(found)


def defer_weight_gradients(module: nn.Module) -> nn.Module:
    """Make every `torch.nn.Linear` inside compute with `hp_platform.linear` from now on.

    The numbers stay the same to the bit. A backward that is split then puts the gradients of these
    layers off in one pass over the graph (`hp_schedule.runtime.DeferringSplitter`): no operation
    runs twice, recompute and FSDP included. Outside a split backward nothing changes.

    Subclasses of Linear are left alone, since they may compute something else.

    Args:
        module: Changed in place: each such layer gets a `forward` of its own.

    Returns:
        The module itself.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return module


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
