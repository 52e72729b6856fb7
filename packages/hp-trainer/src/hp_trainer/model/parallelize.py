"""The one place where model, mesh, experts and pipeline meet.

Every rank builds the same plan, keeps the stages that are its own, shards their experts, fills
them with the weights that the seed and the global names decide, and hands them to the pipeline
runtime of hp-schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import hp_context
import hp_overlap
from hp_expert import save_routing
from hp_platform import Runtime
from hp_schedule import MetaStep, Schedule
from hp_schedule.runtime import (
    FullySharded,
    PipelineScheduleRuntime,
    PipelineStage,
    TensorSpec,
)
from hp_trainer import layout
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Edges, Mesh, even_edges, small_group, tied_group
from hp_trainer.layout.schedules import (
    count_microbatches,
    has_even_edges,
    layers_of_stages,
    placement,
    splits_backward,
    training_schedule,
)
from hp_trainer.layout.sequence import SequenceShare
from hp_trainer.model.buffers import NO_BUFFERS, ExpertBuffers
from hp_trainer.model.capabilities import DocumentTrial, Spreading
from hp_trainer.model.compiled import compile_blocks
from hp_trainer.model.parameters import (
    Declared,
    Parameter,
    declared,
    merge_copies,
    named_parameters,
    share_tables,
)
from hp_trainer.model.spreading import LastBackward, is_sharded, spread
from hp_trainer.model.stage import (
    Stage,
    forget_casts,
    gather_narrow,
    is_activation,
    share_casts,
    split_weight_gradients,
)
from hp_trainer.model.transformer import build_stage, tied_parameters
from hp_trainer.overlap import overlap_experts, overlap_pairs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Pipeline:
    """This rank's stages and what it takes to run schedules over them.

    Attributes:
        modules: Stage index -> module, for the stages of this rank.
        parameters: Parameters of these stages, each once.
        num_stages: Number of stages of the whole pipeline.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        sequence: Which positions this rank has.
        overlap: Runs a forward and a backward at once; None one after the other.
        buffers: Buffers of a fixed size for rows between experts, used in training alone.
    """

    modules: Mapping[int, Stage]
    parameters: Sequence[Parameter]
    num_stages: int
    vocab_size: int
    sequence: SequenceShare
    config: Config
    mesh: Mesh
    device: torch.device
    edges: Edges
    on_step: Callable[[MetaStep], None] | None = None
    overlap: "hp_overlap.CommComputeOverlap | None" = None
    buffers: ExpertBuffers = NO_BUFFERS

    @property
    def is_last(self) -> bool:
        """Tell whether this rank holds the last stage, and so the logits and the loss."""
        return self.num_stages - 1 in self.modules

    @property
    def vocabulary(self) -> range:
        """Return the tokens whose logits this rank computes, if it has the last stage."""
        return self.mesh.share(range(self.vocab_size), "tp")

    def forget_casts(self) -> None:
        """Drop casts of weights at the end of a run: weights may change now."""
        for module in self.modules.values():
            forget_casts(module)
            for part in filter(is_sharded, module.modules() if self._by_block else ()):
                part.reshard()  # what is in no block stays gathered after a forward alone

    @property
    def _by_block(self) -> bool:
        """Tell whether FSDP gathers and reduces by itself, and not when a schedule says so."""
        return self.config.mesh.gather == "block"

    def training(
        self, loss_fn: Callable[[Tensor, Tensor], Tensor], compute: Schedule | None = None
    ) -> PipelineScheduleRuntime:
        """Return the runtime of the configured schedule, or of other steps, for one step."""
        size = self.config.train.microbatch_size
        return self.runner(count_microbatches(self.config), size, loss_fn, compute)

    def runner(
        self,
        num_microbatches: int,
        microbatch_size: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        compute: Schedule | None = None,
        positions: Sequence[int] | None = None,
    ) -> PipelineScheduleRuntime:
        """Return what runs the configured schedule over some microbatches, or its forwards alone.

        Args:
            num_microbatches: Number of microbatches in each run.
            microbatch_size: Number of sequences in each microbatch.
            loss_fn: Function that maps what the last stage returns and targets to a scalar; None to
                get what it returns.
            compute: Compute steps in place of the configured schedule's; see `training_schedule`.
            positions: Positions of each microbatch that are on this rank between layers, where they
                are not those of a sequence.
        """
        # The others need not know: what a stage does for its own parameters, it does alone.
        parts = chain.from_iterable(stage.modules() for stage in self.modules.values())
        sharded = not self._by_block and any(map(is_sharded, parts))
        schedule = training_schedule(
            self.config.pipeline,
            num_ranks=self.mesh.layout.pp,
            num_microbatches=num_microbatches,
            sharded=sharded,
            compute=compute,
            is_split=splits_backward(self.config),
        )
        own = next(iter(self.modules.values())).width_sent
        width, dtype = own or self.config.model.stage_width, DTYPES[self.config.train.dtype]
        whole = (microbatch_size, len(self.sequence.attended), width)
        passed: TensorSpec | Callable[[int], TensorSpec]
        passed = TensorSpec((microbatch_size, len(self.sequence.between), width), dtype)
        if positions is not None:
            specs = [TensorSpec((microbatch_size, size, width), dtype) for size in positions]
            passed = specs.__getitem__
        stages = [
            PipelineStage(
                module,
                stage_index=index,
                num_stages=self.num_stages,
                device=self.device,
                input_spec=passed if index else None,
                output_spec=None if positions is None else passed,
                context_fn=save_routing,
                # Nothing in our own model draws from a generator.
                preserve_rng_state=bool(self.config.model.factory),
                is_offloaded=partial(is_activation, module),
            )
            for index, module in self.modules.items()
        ]
        on_step = self.on_step
        if self._by_block and num_microbatches > 1 and loss_fn is not None:
            once = self.config.mesh.reduce_once
            on_step = LastBackward(
                self.modules, num_microbatches, reduce_once=once, on_step=on_step
            ).before
        runtime = PipelineScheduleRuntime(
            stages,
            schedule,
            pipeline_rank=self.mesh.pp_index,
            transport=self.edges.transport(schedule, whole, dtype),
            loss_fn=loss_fn,
            sharding=_Sharded(stages) if sharded else None,
            on_step=on_step,
        )
        if self.overlap is not None:
            overlap_pairs(runtime, self.overlap)
        return runtime

    def close(self) -> None:
        """End what runs in the background. All ranks call this together."""
        self.edges.close()


class _Sharded(FullySharded):
    """Weights in another dtype are held for as long as those that they were made from."""

    def reshard(self, stage: PipelineStage) -> None:
        """Free a stage's gathered parameters, and what was made from them."""
        super().reshard(stage)
        assert isinstance(stage.module, Stage)
        forget_casts(stage.module)


def build_pipeline(
    config: Config,
    mesh: Mesh,
    runtime: Runtime,
    *,
    vocab_size: int,
    timeout: timedelta,
    on_step: Callable[[MetaStep], None] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Pipeline:
    """Build, shard and initialise this rank's part of the model. All ranks call this together.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        runtime: Device and backend.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        timeout: Time limit of every message between stages.
        on_step: Called before each step of a schedule, for heartbeats.
        on_progress: Called again and again while weights are made, which may take minutes.
    """
    stage_to_rank = placement(config.pipeline, num_ranks=mesh.layout.pp)
    layers, tied = layers_of_stages(config), tied_parameters(config.model)
    # Groups are made by all ranks in one order: edges, tied tables, then beside rows of experts.
    if has_even_edges(config):
        edges = even_edges(mesh, runtime, timeout)
    else:
        edges = layout.uneven_edges(stage_to_rank, mesh, runtime, timeout)
    tied_ranks = tied_group(mesh, runtime, stage_to_rank, timeout=timeout) if tied else None
    beside_rows = small_group(mesh, runtime, timeout=timeout) if config.pipeline.overlap else None
    sequence = SequenceShare.of(
        mesh,
        seq_len=config.data.seq_len,
        gathers_keys=config.mesh.heads_degree < config.mesh.cp,
        splits_positions=not config.model.transformers,
        device=runtime.device,
    )
    context = None
    if config.mesh.cp > 1:
        degree, ring = config.mesh.heads_degree, config.mesh.cp_ring
        context = hp_context.ContextParallel(degree, ring=ring, layout=sequence.layout)
    # Experts of one rank exchange nothing: there a backward and a forward follow each other.
    overlaps = config.pipeline.overlap and mesh.size("ep") > 1
    builder = _StageBuilder(
        config=config,
        mesh=mesh,
        vocab_size=vocab_size,
        layers=layers,
        context=context,
        device=runtime.device,
        overlap=_overlap(timeout) if overlaps else None,
        beside_rows=beside_rows,
    )
    modules: dict[int, Stage] = {}
    parameters: list[Parameter] = []
    for index in (stage for stage, rank in enumerate(stage_to_rank) if rank == mesh.pp_index):
        module, whole = builder.build(index)
        if index and index == len(layers) - 1 and 0 in modules:
            share_tables(modules[0], module, tied)
        found = named_parameters(module, whole, mesh)
        module.initialize(found, config.model, seed=config.run.seed, on_progress=on_progress)
        if config.data.documents == "separate" and isinstance(module, DocumentTrial):
            module.try_documents()  # the weights are there now
        parameters += found
        modules[index] = module
    return Pipeline(
        modules=modules,
        parameters=merge_copies(parameters, tied, tied_ranks),
        num_stages=len(layers),
        vocab_size=vocab_size,
        sequence=sequence,
        config=config,
        mesh=mesh,
        device=runtime.device,
        edges=edges,
        on_step=on_step,
        overlap=builder.overlap,
        buffers=ExpertBuffers.of(
            [*modules.values()],
            config,
            mesh,
            positions=len(sequence.attended),
            device=runtime.device,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _StageBuilder:
    """Builds the stages of one rank: cut, sharded, on its device, without values yet.

    Attributes:
        config: Configuration of the run.
        mesh: Mesh of the run.
        vocab_size: Tokens of the vocabulary.
        layers: Layers of each stage.
        context: How context-parallel ranks exchange keys and values; None: there are none.
        device: Device of the stages.
        overlap: Runs a forward and a backward at once; None one after the other.
        beside_rows: Group for what is sent beside rows of experts, if there is one.
    """

    config: Config
    mesh: Mesh
    vocab_size: int
    layers: Sequence[range]
    context: "hp_context.ContextParallel | None"
    device: torch.device
    overlap: "hp_overlap.CommComputeOverlap | None"
    beside_rows: ProcessGroup | None

    def build(self, index: int) -> tuple[Stage, Mapping[str, Declared]]:
        """Build a stage; the order of what is done to it matters.

        Args:
            index: Index of the stage.

        Returns:
            The stage, and what the whole of each of its parameters is.
        """
        config, mesh = self.config, self.mesh
        by_block = config.mesh.gather == "block"
        module = build_stage(
            config.model,
            self.vocab_size,
            layers=self.layers[index],
            first=index == 0,
            last=index == len(self.layers) - 1,
            compute_dtype=DTYPES[config.train.dtype],
        )
        # Parameters stay fp32 under bf16 compute: they are the masters that the optimizer updates.
        module.to(torch.promote_types(module.compute_dtype, torch.float32))
        if isinstance(module, Spreading):
            module.expect_ranks({axis: mesh.size(axis) for axis in ("ep", "tp", "cp")})
        whole = declared(module)
        spread(module, mesh, self.context, self.vocab_size, by_block=by_block)
        if self.overlap is not None:
            overlap_experts(module, self.overlap, small_group=self.beside_rows)
        module.to_empty(device=self.device)
        gather_narrow(module)
        share_casts(module, sharded=not by_block)
        split_weight_gradients(module, is_split=splits_backward(config))
        module.recompute(config.train.recompute)
        compile_blocks(module, config.train.compile)
        return module, whole


def _overlap(timeout: timedelta) -> "hp_overlap.CommComputeOverlap":
    # A collective that fails says more than a turn that does not come: let it be the first.
    return hp_overlap.CommComputeOverlap(
        hp_overlap.HookCoordinator(timeout=2 * timeout.total_seconds()),
        strict=True,
        puts_off_weight_gradients=True,  # gradients are reduced when the schedule says so
    )
