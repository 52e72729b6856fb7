"""One stage of a pipeline: a module, its place, its inputs, its backward in one part or two."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hp_platform import WeightGradQueue, linear
from hp_schedule.runtime.retention import (
    ContextFunction,
    Recomputation,
    SavedTensors,
    tensors_within,
)
from hp_schedule.runtime.specs import Specs, TensorSpec, as_specs, describe

Grads = tuple[Tensor | None, ...]
"""One gradient per tensor; None where nothing reached it."""

WeightBackward = Callable[[], object]
"""Computes the weight gradients that were put off; called once, its result is not looked at."""


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
        return found, partial(queue.flush, 0)


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


GivenSpecs = TensorSpec | Sequence[TensorSpec]
"""Specs of one message: one for each of its tensors, or just one for a single tensor."""


class PipelineStage:
    """A module and its place in the pipeline, without state of any run.

    Args:
        module: Called as ``module(*received, **kwargs)`` with the tensors that the stage before
            returned, or, at the start of a chain, as ``module(*args, **kwargs)`` with the
            microbatch's own arguments. Returns a tensor or a sequence of tensors; at the end of a
            chain whatever the loss function takes, or without one the loss itself. What it returns
            is still on its way while later microbatches run: a buffer that those change is to be
            returned as a clone. What it receives are leaves, so those that require grad cannot be
            changed in place.
        stage_index: Index of the stage, from 0.
        num_stages: Stages of the whole schedule.
        device: Device of received tensors; the module must be there already.
        input_spec: Specs of the tensors that the stage receives for each microbatch. Receives are
            then posted as early as the schedule says. None: the sender tells the shapes, which may
            differ per microbatch, in a small message ahead of each; the tensors themselves are
            asked for when the stage needs them, so their way is not hidden behind compute, and on
            CUDA the host waits for the small message. A function of the microbatch's index: shapes
            differ per microbatch as both ends know beforehand; see `output_spec`.
        output_spec: Specs that every output must fit, if given. A function of the microbatch's
            index: so must what the next stage receives, whose `input_spec` is the same function
            then; neither asks the other.
        splitter: Splits the backward for schedules that run its two parts as steps of their own.
        context_fn: Makes the contexts of a forward that keeps nothing and of its RECOMPUTE, for
            decisions that both must share, as that of `torch.utils.checkpoint` does.
        preserve_rng_state: Whether a RECOMPUTE draws the random numbers of its forward; False for
            modules that draw none.
        is_offloaded: Predicate of a tensor that autograd saves: whether OFFLOAD moves it. Tensors
            that others hold anyway stay: parameters, buffers, inputs, outputs. Default: moves all
            else.

    Raises:
        ValueError: If the index is out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_spec: GivenSpecs | Callable[[int], GivenSpecs] | None = None,
        output_spec: GivenSpecs | Callable[[int], GivenSpecs] | None = None,
        splitter: BackwardSplitter | None = None,
        context_fn: ContextFunction | None = None,
        preserve_rng_state: bool = True,
        is_offloaded: Callable[[Tensor], bool] | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"stage_index ({stage_index}) must be >= 0 and < num_stages ({num_stages})"
            )
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self._received, self._sent = input_spec, output_spec
        self.input_spec = None if callable(input_spec) else as_specs(input_spec)
        self.output_spec = None if callable(output_spec) else as_specs(output_spec)
        self.splitter: BackwardSplitter = DeferringSplitter() if splitter is None else splitter
        self._context_fn = context_fn
        self._preserve_rng_state = preserve_rng_state
        self._is_offloaded = is_offloaded

    @property
    def is_planned(self) -> tuple[bool, bool]:
        """Tell whether the shapes of its inputs, and of its outputs, are known by microbatch."""
        return callable(self._received), callable(self._sent)

    def received(self, microbatch: int) -> Specs | None:
        """Return the specs of its inputs for a microbatch; None: the sender tells them."""
        given = self._received
        return as_specs(given(microbatch)) if callable(given) else self.input_spec

    def sent(self, microbatch: int) -> Specs | None:
        """Return the specs of its outputs where they are known by microbatch; None elsewhere."""
        given = self._sent
        return as_specs(given(microbatch)) if callable(given) else None

    def forward_one_chunk(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Run the module on one microbatch and return its output.

        Raises:
            ValueError: If its output does not fit output_spec.
        """
        output = self.module(*args, **kwargs)
        if self.output_spec is not None:
            self._check_output(self.tensors_of(output))
        return output

    def recomputation(self) -> Recomputation:
        """Return the contexts in which a forward keeps nothing and runs again."""
        return Recomputation(
            self.device,
            preserve_rng_state=self._preserve_rng_state,
            context_fn=self._context_fn,
        )

    def saved_tensors(self, passed: Iterable[object]) -> SavedTensors:
        """Return the store of all tensors that autograd saves in a forward.

        Args:
            passed: Arguments of the forward; their tensors stay where they are.
        """
        module = self.module
        given = [tensor for value in passed for tensor in tensors_within(value)]
        return SavedTensors(
            self.device,
            is_moved=self._is_offloaded,
            stays=[*module.parameters(), *module.buffers(), *given],
        )

    def backward_one_chunk(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], *, inputs: Sequence[Tensor]
    ) -> Grads:
        """Run the backward of one microbatch; parameter gradients accumulate.

        Args:
            outputs: Tensors that require grad, each with its graph.
            grads: Their gradients, as many.
            inputs: Inputs of the forward: leaves that require grad.

        Returns:
            The gradients of the inputs, None where nothing reached one.
        """
        return full_backward(outputs, grads, inputs=inputs)

    def backward_input_one_chunk(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], *, inputs: Sequence[Tensor]
    ) -> tuple[Grads, WeightBackward]:
        """Run the first part of a backward; return its gradients and a function for the second."""
        return self.splitter.split_backward(self.module, outputs, grads, inputs=inputs)

    def tensors_of(self, output: object) -> tuple[Tensor, ...]:
        """Return the tensors that an output passes on to the next stage.

        Raises:
            TypeError: If it is no tensor and no sequence of tensors.
        """
        tensors = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"output ({type(tensor).__name__}) of stage {self.stage_index} must be a "
                    "Tensor or a sequence of Tensors"
                )
        return tensors

    def _check_output(self, tensors: Sequence[Tensor]) -> None:
        specs = self.output_spec or ()
        if len(tensors) != len(specs) or not all(
            spec.fits(tensor) for spec, tensor in zip(specs, tensors, strict=True)
        ):
            raise ValueError(
                f"output ({describe(map(TensorSpec.of, tensors))}) must be as output_spec "
                f"({describe(specs)})"
            )
