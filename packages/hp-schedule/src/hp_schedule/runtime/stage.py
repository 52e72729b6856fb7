"""One stage of a pipeline: a module, its place, and what comes in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that a stage receives for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class PipelineStage:
    """A module and its place in the pipeline. Holds no state of any run.

    Args:
        module: Called as ``module(x, **kwargs)`` with what the stage before returned, or, as the
            first stage, as ``module(*args, **kwargs)`` with the microbatch's own arguments.
            Returns one tensor.
        stage_index: Place of the stage, from 0.
        num_stages: Stages of the whole pipeline.
        device: Where received tensors are put; the module must be there already.
        input_spec: What the stage receives for each microbatch; None for the first stage.
        output_spec: If given, what every output must look like.

    Raises:
        ValueError: If the index is out of range, or input_spec is missing or superfluous.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_spec: TensorSpec | None = None,
        output_spec: TensorSpec | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"stage_index ({stage_index}) must be >= 0 and < num_stages ({num_stages})"
            )
        if (input_spec is None) != (stage_index == 0):
            needed = "None" if stage_index == 0 else "given"
            raise ValueError(f"input_spec ({input_spec}) must be {needed} for stage {stage_index}")
        self.module = module
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.input_spec = input_spec
        self.output_spec = output_spec

    @property
    def is_first(self) -> bool:
        """Whether the stage reads the microbatches' arguments."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage's output goes into the loss."""
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Run the module on one microbatch.

        Raises:
            TypeError: If it does not return a tensor.
            ValueError: If its output does not fit output_spec.
        """
        output = self.module(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"output ({type(output).__name__}) of a stage must be a Tensor")
        if self.output_spec is not None and TensorSpec.of(output) != self.output_spec:
            raise ValueError(
                f"output ({TensorSpec.of(output)}) must be as output_spec ({self.output_spec})"
            )
        return output

    def backward_one_chunk(
        self, output: Tensor, grad: Tensor | None, *, received: Tensor | None
    ) -> Tensor | None:
        """Run the backward of one microbatch; parameter gradients accumulate.

        Args:
            output: What the forward returned, or the loss.
            grad: Gradient of output; None for a loss.
            received: The input of the forward, a leaf; None for the first stage.

        Returns:
            The gradient of `received`, zeros if nothing reached it; None for the first stage.
        """
        if output.requires_grad:
            # In this thread, so that what is bound to it (deferred weight gradients) applies.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(output, grad)
        if received is None:
            return None
        result, received.grad = received.grad, None
        return torch.zeros_like(received) if result is None else result
