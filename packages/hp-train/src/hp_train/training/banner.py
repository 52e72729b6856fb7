"""The first lines of a run: what is trained, where, and how it is laid out."""

import os
from importlib.metadata import version
from pathlib import Path

import torch

from hp_checkpoint.json_file import read_json
from hp_checkpoint.weight_files import first_of
from hp_platform import Runtime
from hp_platform.device.dry import is_dry
from hp_train import __version__
from hp_train.config import Config
from hp_train.hugging_face.proven import doubts
from hp_train.layout.mesh import Mesh
from hp_train.price.gather import in_words
from hp_train.training.gpu_settings import in_force
from hp_train.training.gradients import GradientNorm
from hp_train.training.metrics import METRICS
from hp_train.transformers_model.load import left_out

_MOST_BYTES = 1 << 20  # of a config


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
        f"hp-train {__version__}, torch {torch.__version__}: {where}",
        f"mesh   {mesh.layout}{in_words(config)}, schedule {schedule}",
        f"model  {size}: {model.num_layers} layers of {model.dim}, {experts}",
        f"batch  {batch} in microbatches of {train.microbatch_size}, {train.steps} steps",
    ]
    if model.transformers:
        lines += _doubts(config)
    if train.compile != "none":
        lines.append(f"compile {train.compile}: in the first steps; what it takes is in {METRICS}")
    if runtime.device.type == "cuda":
        lines.append(f"gpu    {' '.join(in_force(os.environ)) or 'nothing set'}")
    return lines


def _doubts(config: Config) -> list[str]:
    """What of a run of `model.transformers` was never compared with one process, in lines."""
    path = Path(config.model.transformers) / "config.json"
    model_type = str(read_json(path, most_bytes=_MOST_BYTES).get("model_type"))
    lines = doubts(model_type, config, version("transformers"))
    if not (config.run.resume or is_dry()) and (names := left_out(config.model)):
        lines.append(
            f"warning: {first_of(names)} of {path.parent} are of no part of the model in "
            "transformers: they are not trained"
        )
    return lines
