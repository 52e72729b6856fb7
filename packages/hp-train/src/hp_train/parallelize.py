"""The one place where model, mesh, experts and pipeline meet.

Every rank builds the same plan, keeps the stages that are its own, shards their experts, fills
them with the weights that the seed and the global names decide, and hands them to the pipeline
runtime of hp-schedule.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from hp_expert import ExpertParallel, GroupedExperts
from hp_overlap import CommComputeOverlap, HookCoordinator
from hp_platform import Runtime
from hp_schedule import (
    MetaStep,
    Schedule,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    validate,
)
from hp_schedule.runtime import (
    EdgeGroups,
    PipelineScheduleRuntime,
    PipelineStage,
    TensorSpec,
    TorchTransport,
    build_edge_groups,
)
from hp_train.config import Config, PipelineConfig
from hp_train.mesh import Mesh
from hp_train.model import TransformerStage, initialize_parameters
from hp_train.overlap import overlap_experts, overlap_pairs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage: as even as can be, the longer runs first.

    Raises:
        ValueError: When there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"num_layers ({num_layers}) must be at least num_stages ({num_stages})")
    short, longer = divmod(num_layers, num_stages)
    bounds = [stage * short + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def training_schedule(config: PipelineConfig, *, num_ranks: int, num_microbatches: int) -> Schedule:
    """The configured schedule with its communication, proven before it is used.

    Raises:
        hp_schedule.ScheduleError: When the schedule would not complete.
    """
    if config.schedule == "gpipe":
        schedule = gpipe(num_ranks, num_microbatches=num_microbatches)
    elif config.schedule == "1f1b":
        schedule = one_f_one_b(num_ranks, num_microbatches=num_microbatches)
    else:
        schedule = interleaved_1f1b(
            num_ranks,
            num_microbatches=num_microbatches,
            num_stages_per_rank=config.stages_per_rank,
            overlap_b_f=config.overlap_b_f,
        )
    return _with_communication(schedule)


def _with_communication(schedule: Schedule) -> Schedule:
    schedule = add_send_recv(schedule)
    validate(schedule).raise_if_failed()
    return schedule


@dataclass(frozen=True)
class Pipeline:
    """This rank's stages and what it takes to run schedules over them.

    Attributes:
        modules: Stage index -> module, for the stages of this rank.
        num_stages: Of the whole pipeline.
        overlap: Runs pairs of a backward and a forward at once; None one after the other.
    """

    modules: Mapping[int, TransformerStage]
    num_stages: int
    config: Config
    mesh: Mesh
    device: torch.device
    edge_groups: EdgeGroups
    on_step: Callable[[MetaStep], None] | None = None
    overlap: CommComputeOverlap | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so the logits and the loss."""
        return self.num_stages - 1 in self.modules

    def training(
        self, loss_fn: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Schedule, PipelineScheduleRuntime]:
        """The configured schedule over one step's microbatches, and what runs it."""
        train = self.config.train
        num_microbatches = train.global_batch_size // (self.mesh.layout.dp * train.microbatch_size)
        schedule = training_schedule(
            self.config.pipeline, num_ranks=self.mesh.layout.pp, num_microbatches=num_microbatches
        )
        return schedule, self._runner(schedule, train.microbatch_size, loss_fn)

    def inference(self, *, num_microbatches: int, microbatch_size: int) -> PipelineScheduleRuntime:
        """A forward-only pass that returns the logits on the last rank."""
        schedule = forward_only(
            self.mesh.layout.pp,
            num_microbatches=num_microbatches,
            num_stages_per_rank=self.num_stages // self.mesh.layout.pp,
        )
        return self._runner(_with_communication(schedule), microbatch_size, None)

    def _runner(
        self,
        schedule: Schedule,
        microbatch_size: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> PipelineScheduleRuntime:
        shape = (microbatch_size, self.config.data.seq_len, self.config.model.dim)
        activations = TensorSpec(shape, DTYPES[self.config.train.dtype])
        stages = [
            PipelineStage(
                module,
                stage_index=index,
                num_stages=self.num_stages,
                device=self.device,
                input_spec=activations if index else None,
            )
            for index, module in self.modules.items()
        ]
        pipeline = self.mesh.layout.pipelines()[self.mesh.dp_index]
        runtime = PipelineScheduleRuntime(
            stages,
            schedule,
            pipeline_rank=self.mesh.pp_index,
            transport=TorchTransport(schedule, rank_of=pipeline, groups=self.edge_groups),
            loss_fn=loss_fn,
            on_step=self.on_step,
        )
        if self.overlap is not None:
            overlap_pairs(runtime, self.overlap)
        return runtime


def build_pipeline(
    config: Config,
    mesh: Mesh,
    runtime: Runtime,
    *,
    vocab_size: int,
    timeout: timedelta,
    on_step: Callable[[MetaStep], None] | None = None,
) -> Pipeline:
    """Build, shard and initialise this rank's part of the model. All ranks call this together.

    Args:
        config: Of the run.
        mesh: Of the run.
        runtime: Device and backend.
        vocab_size: Of the tokenizer.
        timeout: Of every message between stages.
        on_step: Called before each step of a schedule, for heartbeats.
    """
    num_stages = mesh.layout.pp * config.pipeline.stages_per_rank
    layers = split_layers(config.model.num_layers, num_stages)
    edge_groups = build_edge_groups(
        mesh.layout.pipelines(), backend=runtime.backend, timeout=timeout
    )
    modules = {
        stage: _build_stage(
            config, mesh, stage=stage, layers=layers, vocab_size=vocab_size, device=runtime.device
        )
        for stage in range(mesh.pp_index, num_stages, mesh.layout.pp)
    }
    overlap = None
    if config.pipeline.overlap_b_f:
        # A collective that fails says more than a turn that does not come: let it be the first.
        coordinator = HookCoordinator(timeout=2 * timeout.total_seconds())
        overlap = CommComputeOverlap(coordinator, strict=True)
        for module in modules.values():
            overlap_experts(module, overlap)
    return Pipeline(
        modules, num_stages, config, mesh, runtime.device, edge_groups, on_step, overlap
    )


def _build_stage(
    config: Config,
    mesh: Mesh,
    *,
    stage: int,
    layers: Sequence[range],
    vocab_size: int,
    device: torch.device,
) -> TransformerStage:
    compute_dtype = DTYPES[config.train.dtype]
    with torch.device("meta"):
        module = TransformerStage(
            config.model,
            vocab_size,
            layers=layers[stage],
            first=stage == 0,
            last=stage == len(layers) - 1,
            compute_dtype=compute_dtype,
        )
    for part in module.modules():
        if isinstance(part, GroupedExperts):
            ExpertParallel().apply(part, mesh.ep)
    # Parameters stay fp32 under bf16 compute: they are the masters that the optimizer updates.
    module.to(torch.promote_types(compute_dtype, torch.float32)).to_empty(device=device)
    initialize_parameters(module, config.model, seed=config.run.seed)
    return module
