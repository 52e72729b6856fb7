"""Any schedule behind the interface of `torch.distributed.pipelining`.

Code written for torch's schedules makes `torch.distributed.pipelining.PipelineStage` objects and
calls `step`. Here the same calls run on this package's runtime: of torch's stages only the module,
the place, the device and the group are used, all public.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_schedule.runtime.fsdp import FullySharded, sharded_modules
from hp_schedule.runtime.graph_cut import GraphCuttingSplitter
from hp_schedule.runtime.schedules import PipelineSchedule, from_schedule
from hp_schedule.runtime.shared import SharedParameterInfo
from hp_schedule.runtime.specs import TensorSpec
from hp_schedule.runtime.stage import BackwardSplitter, PipelineStage
from hp_schedule.schedule import Schedule


class TorchStage(Protocol):
    """The attributes of a `torch.distributed.pipelining.PipelineStage` that are used here."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    device: torch.device
    group: ProcessGroup | None
    dw_builder: Any


InputSpecs = Mapping[int, TensorSpec | Sequence[TensorSpec]]


def as_torch_schedule(
    schedule: Schedule,
    stages: TorchStage | Sequence[TorchStage],
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    args_chunk_spec: tuple[object, ...] | None = None,
    kwargs_chunk_spec: dict[str, object] | None = None,
    output_merge_spec: dict[str, object] | tuple[object, ...] | None = None,
    scale_grads: bool = True,
    input_specs: InputSpecs | None = None,
    splitter: BackwardSplitter | None = None,
    shared_parameters: Sequence[SharedParameterInfo] = (),
) -> "TorchSchedule":
    """Return a runtime for a schedule on torch's stages; every rank of the world calls this.

    Args:
        schedule: Schedule to run; messages are inserted if it has none. Its number of microbatches
            is that of every step. It has its own placement of the stages: a loop, a V or any other.
        stages: Stages of this rank. Where `fully_shard` was applied to their modules the schedule
            takes command (`FullySharded`); FSDP steps are added if it has none.
        loss_fn: ``loss_fn(output, target)`` returns a scalar. None: `step` only runs forward.
        args_chunk_spec: Same as in torch: `TensorChunkSpec` per positional argument.
        kwargs_chunk_spec: The same for keyword arguments, by name.
        output_merge_spec: Same as in torch: how outputs of microbatches are put together.
        scale_grads: Whether gradients are those of the mean over the microbatches' losses. The
            loss is scaled, not the gradients, so steps may be repeated to accumulate.
        input_specs: Specs of one microbatch of the input, by index of the stage. Receives are then
            posted ahead of time; stages that are not named are told the shapes by the sender, so
            microbatches may differ.
        splitter: Splits backwards in schedules with I and W steps; default by cutting the graph.
        shared_parameters: Parameters that several stages have.

    Raises:
        ScheduleError: If the schedule is not valid.
        ValueError: If stages and schedule do not fit each other, or a stage has a `dw_builder`.
    """
    given = list(stages) if isinstance(stages, Sequence) else [stages]
    if not given:
        raise ValueError("len(stages) (0) must be >= 1")
    if len(schedule.chains) != 1:
        raise ValueError(f"len(chains) ({len(schedule.chains)}) must be 1 for torch's stages")
    specs = input_specs or {}
    splitter = GraphCuttingSplitter() if splitter is None else splitter
    loss = _Loss(loss_fn)
    converted = [_converted(stage, splitter, specs.get(stage.stage_index)) for stage in given]
    is_sharded = any(sharded_modules(stage.module) for stage in converted)
    runtime = from_schedule(
        schedule,
        converted,
        pipelines=given[0].group,
        loss_fn=loss,
        loss_scale=1 / schedule.num_microbatches if scale_grads else 1.0,
        sharding=FullySharded(converted) if is_sharded else None,
        shared_parameters=shared_parameters,
    )
    return TorchSchedule(
        runtime,
        loss,
        args_chunk_spec=args_chunk_spec,
        kwargs_chunk_spec=kwargs_chunk_spec,
        output_merge_spec=output_merge_spec,
    )


class TorchSchedule:
    """A schedule with `step` and `eval` as torch's schedules have them; see `as_torch_schedule`.

    Attributes:
        runtime: Runtime that runs the schedule: registers functions, records timelines.
    """

    def __init__(
        self,
        runtime: PipelineSchedule,
        loss: "_Loss",
        *,
        args_chunk_spec: tuple[object, ...] | None,
        kwargs_chunk_spec: dict[str, object] | None,
        output_merge_spec: dict[str, object] | tuple[object, ...] | None,
    ) -> None:
        self.runtime = runtime
        self._loss = loss
        self._specs = (args_chunk_spec, kwargs_chunk_spec)
        self._merge_spec = output_merge_spec
        last = runtime.schedule.chains[0][-1]
        self._has_end = runtime.schedule.stage_to_rank[last] == runtime.pipeline_rank

    def step(
        self,
        *args: object,
        target: object = None,
        losses: MutableSequence[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> Any:
        """Train on one batch; parameter gradients accumulate.

        Args:
            *args: Positional arguments of the first stage for the whole batch; none on ranks
                without it.
            target: Target of the loss function for the whole batch; only needed where the last
                stage is.
            losses: Gets the loss of each microbatch where the last stage is, not scaled, detached.
            return_outputs: Whether to return outputs.
            loss_kwargs: Further arguments of the loss function.
            **kwargs: Keyword arguments of every stage for the whole batch.

        Returns:
            The outputs of all microbatches in one where the last stage is, detached; else None.

        Raises:
            RuntimeError: If grad mode is off.
            Exception: Whatever a stage raises, as in `PipelineScheduleRuntime.run_microbatches`.
        """
        if self._loss.fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        if not torch.is_grad_enabled():
            raise RuntimeError("grad mode (off) must be on for step(); eval() needs none")
        self._loss.kwargs = loss_kwargs or {}
        self.runtime.return_outputs = return_outputs
        result = self.runtime.run_microbatches(*self._split(args, kwargs, target), record=False)
        return self._finish(result.losses, result.outputs, losses)

    def eval(
        self,
        *args: object,
        target: object = None,
        losses: MutableSequence[Tensor] | None = None,
        **kwargs: object,
    ) -> Any:
        """Run forward only, without gradients; those that are there stay as they are.

        Takes and returns what `step` does. Without a target there are no losses.
        """
        self._loss.kwargs = {}
        self.runtime.return_outputs = True
        result = self.runtime.evaluate_microbatches(*self._split(args, kwargs, target))
        return self._finish(result.losses, result.outputs, losses)

    def _split(
        self, args: tuple[object, ...], kwargs: dict[str, object], target: object
    ) -> tuple[list[tuple[object, ...]], list[dict[str, object]], list[object] | None]:
        num = self.runtime.num_microbatches
        cut_args: list[tuple[object, ...]] = [()] * num
        cut_kwargs: list[dict[str, object]] = [{}] * num
        if args or kwargs:
            args_spec, kwargs_spec = self._specs
            cut_args, cut_kwargs = _torchs().split_args_kwargs_into_chunks(
                args, kwargs, num, args_spec if args else None, kwargs_spec
            )
        targets = None
        if target is not None:
            targets = [t for (t,) in _torchs().split_args_kwargs_into_chunks((target,), {}, num)[0]]
        return cut_args, cut_kwargs, targets

    def _finish(
        self,
        found: Sequence[Tensor],
        outputs: Sequence[object],
        losses: MutableSequence[Tensor] | None,
    ) -> object:
        if self._has_end and losses is not None:
            losses[:] = found
        return _torchs().merge_chunks(list(outputs), self._merge_spec) if outputs else None


class _Loss:
    """The loss function with the further arguments of the current step."""

    def __init__(self, fn: Callable[..., Tensor] | None) -> None:
        self.fn = fn
        self.kwargs: Mapping[str, object] = {}

    def __call__(self, output: object, target: object) -> Tensor:
        if self.fn is None:
            raise RuntimeError("loss_fn (None) must be given to compute a loss")
        return self.fn(output, target, **self.kwargs)


def _torchs() -> ModuleType:
    """Return torch's module that cuts and merges microbatches; torch's stages have imported it."""
    return import_module("torch.distributed.pipelining.microbatch")


def _converted(
    stage: TorchStage,
    splitter: BackwardSplitter,
    spec: TensorSpec | Sequence[TensorSpec] | None,
) -> PipelineStage:
    if stage.dw_builder is not None:
        raise ValueError(
            f"dw_builder of stage {stage.stage_index} must be None: the splitter puts weight "
            "gradients off"
        )
    return PipelineStage(
        stage.submod,
        stage_index=stage.stage_index,
        num_stages=stage.num_stages,
        device=stage.device,
        input_spec=spec,
        splitter=splitter,
    )
