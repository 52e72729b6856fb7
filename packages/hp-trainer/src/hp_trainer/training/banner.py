"""The first lines of a run: what is trained, where, and how it is laid out."""

import os

import torch

from hp_platform import Runtime
from hp_trainer import __version__
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.plugins import plugins
from hp_trainer.training.gpu_settings import in_force
from hp_trainer.training.gradients import GradientNorm
from hp_trainer.training.metrics import METRICS


def banner(config: Config, mesh: Mesh, runtime: Runtime, norm: GradientNorm) -> list[str]:
    """Lines that say model size, mesh and batch.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        runtime: Device and backend.
        norm: Knows the sizes of all parameters of all ranks.
    """
    model, train = config.model, config.train
    total = sum(norm.sizes.values())
    inactive = 1 - model.top_k / model.num_experts if model.num_experts else 0.0
    active = total - inactive * sum(n for name, n in norm.sizes.items() if name.endswith("]"))
    where = f"{runtime.info.world_size} processes on {runtime.device.type} ({runtime.backend})"
    schedule = f"{config.pipeline.schedule}, {config.pipeline.stages_per_rank} stages per rank"
    experts = (
        f"{model.num_experts} experts, top {model.top_k}, {model.num_shared_experts} shared"
        if model.num_experts
        else "dense"
    )
    size = f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active per token"
    batch = f"{train.global_batch_size} sequences x {config.data.seq_len} tokens"
    lines = [
        f"hp-trainer {__version__}, torch {torch.__version__}: {where}",
        f"mesh   {mesh.layout}{gathered_by(config, mesh.layout)}, schedule {schedule}",
        f"model  {size}: {model.num_layers} layers of {model.dim}, {experts}",
        f"batch  {batch} in microbatches of {train.microbatch_size}, {train.steps} steps",
    ]
    for notes in plugins("hp_trainer.notes"):
        lines += notes(config)
    if train.compile != "none":
        lines.append(f"compile {train.compile}: in the first steps; what it takes is in {METRICS}")
    if runtime.device.type == "cuda":
        lines.append(f"gpu    {' '.join(in_force(os.environ)) or 'nothing set'}")
    return lines


def gathered_by(config: Config, layout: Layout) -> str:
    """Say how parameters are gathered, as a clause behind a layout; nothing where none are.

    Args:
        config: Configuration of the run.
        layout: Its layout.
    """
    if not any(stage.is_sharded for stage in layout.stages):
        return ""
    return f", gathered by {'block' if config.mesh.gather == 'block' else 'stage'}"
