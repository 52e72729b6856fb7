"""Rules that tie several keys together, and keys to the file system. All of them are here.

Each rule is a function that yields the sentence about every way in which it is broken:
``key (value) must relation key (value)``, then the nearest values that would do.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from hp_train.config import Config, MeshConfig, ModelConfig
from hp_train.environment import World
from hp_train.errors import ConfigError
from hp_train.layout import StageLayout
from hp_train.schedules import KINDS, count_stages
from hp_train.schema import did_you_mean, shown

_DATA_AXES = ("dp_replicate", "dp_shard")
_STAGE_AXES = (*_DATA_AXES, "cp", "tp")


def check(config: Config, world: World | None = None) -> None:
    """Refuse a config that breaks a rule.

    Args:
        config: With every single value in its bounds.
        world: The processes that torchrun or Slurm started; None where neither did.

    Raises:
        ConfigError: About the first broken rule.
    """
    for problem in _problems(config, world):
        raise ConfigError(problem)


def allows_layout(config: Config) -> bool:
    """Whether mesh, pipeline and batch of a config go together with its model.

    What has nothing to do with them, files above all, is not looked at: this is for trying many.
    """
    return next(_layout_problems(config, None), None) is None


def allows_stages(config: Config) -> bool:
    """Whether sizes of single stages go with those of the mesh that all have in common."""
    return next(_stage_lists(config.mesh), None) is None


def require_run_directory(path: str) -> None:
    """Refuse to go on with something that is no run directory.

    Raises:
        ConfigError: When it has no ``config.toml``.
    """
    if not _is_file(f"{path}/config.toml"):
        raise ConfigError(
            f"run.resume ({_path(path)}) must be a run directory, with a config.toml"
            f"{_neighbour(path)}"
        )


def _problems(config: Config, world: World | None) -> Iterator[str]:
    yield from _layout_problems(config, world)
    yield from _model(config)
    yield from _saving(config)
    yield from _files(config)
    yield from _extras(config)


def _layout_problems(config: Config, world: World | None) -> Iterator[str]:
    yield from _stage_lists(config.mesh)
    yield from _mesh(config, world)
    yield from _pipeline(config)
    yield from _overlap(config)
    yield from _batches(config)


def _mesh(config: Config, world: World | None) -> Iterator[str]:
    mesh, num_processes = config.mesh, config.launch.num_processes
    place = f"launch.num_processes ({num_processes})"
    if world is not None:
        if num_processes not in (0, world.size):
            yield f"{place} must equal {world}"
        num_processes, place = world.size, str(world)
    if num_processes not in (0, config.world_size):
        product = _product(mesh, "pp", *_STAGE_AXES)
        hint = _fit(config, num_processes)
        if mesh.stage_tp:
            ranks = f"mesh.stage_tp ({shown(mesh.stage_tp)}) of {sum(mesh.stage_tp)} ranks"
            others = _factors(mesh, *_STAGE_AXES[:-1])
            product, hint = f"{ranks} x {others} = {config.world_size}", ""
        yield f"{product} must equal {place}{hint}"
    for stage_mesh in _stage_meshes(mesh):
        here = replace(config, mesh=stage_mesh)
        yield from _expert_ranks(here)
        yield from _tensor_ranks(here)
        yield from _context_ranks(here)


def _stage_lists(mesh: MeshConfig) -> Iterator[str]:
    for name in ("tp", "ep"):
        sizes, shared = getattr(mesh, f"stage_{name}"), getattr(mesh, name)
        key = f"mesh.stage_{name} ({shown(sizes)})"
        if sizes and len(sizes) != mesh.pp:
            yield f"{key} must have a size for each of mesh.pp ({mesh.pp}) pipeline ranks"
        if sizes and shared != 1:
            yield f"mesh.{name} ({shared}) must be 1 with {key}"


def _stage_meshes(mesh: MeshConfig) -> list[MeshConfig]:
    """The mesh with the sizes of each stage in the place of those of all; of equal ones one."""
    if not mesh.stage_tp and not mesh.stage_ep:
        return [mesh]
    sizes = dict.fromkeys(zip(mesh.tp_sizes, mesh.ep_sizes, strict=True))
    return [replace(mesh, tp=tp, ep=ep) for tp, ep in sizes]


def _expert_ranks(config: Config) -> Iterator[str]:
    mesh, model = config.mesh, config.model
    stage = StageLayout.of(mesh, tp=mesh.tp, ep=mesh.ep)
    ranks, replica = mesh.ep * mesh.etp, stage.fsdp * stage.tp
    experts = _product(mesh, "ep", "etp") if mesh.etp > 1 else _factors(mesh, "ep")
    if stage.num_ranks % ranks:
        hint = _divisors(ranks, stage.num_ranks) if mesh.etp == 1 else ""
        yield f"{experts} must divide {_product(mesh, *_STAGE_AXES)}{hint}"
    elif replica % ranks and ranks % replica:
        yield (
            f"{experts} must divide or be a multiple of {_product(mesh, 'dp_shard', 'cp', 'tp')}"
        )
    if model.num_experts % mesh.ep:
        yield (
            f"{_factors(mesh, 'ep')} must divide model.num_experts ({model.num_experts})"
            f"{_divisors(mesh.ep, model.num_experts)}"
        )
    if model.expert_hidden % mesh.etp:
        yield (
            f"mesh.etp ({mesh.etp}) must divide model.expert_hidden ({model.expert_hidden})"
            f"{_divisors(mesh.etp, model.expert_hidden)}"
        )


def _tensor_ranks(config: Config) -> Iterator[str]:
    tp, model = config.mesh.tp, config.model
    cut = {"num_heads": model.num_heads}
    if model.attention == "gqa":
        cut["num_kv_heads"] = model.num_kv_heads
    if model.num_dense_layers:
        cut["dense_hidden"] = model.dense_hidden
    for name, size in cut.items():
        if size % tp:
            ranks = _factors(config.mesh, "tp")
            yield f"{ranks} must divide model.{name} ({size}){_divisors(tp, size)}"


def _context_ranks(config: Config) -> Iterator[str]:
    mesh, model, seq_len = config.mesh, config.model, config.data.seq_len
    degree = mesh.heads_degree
    if mesh.cp % degree:
        yield (
            f"mesh.cp_heads ({degree}) must divide mesh.cp ({mesh.cp}){_divisors(degree, mesh.cp)}"
        )
    heads = model.num_heads // mesh.tp
    if heads % degree:
        key = f"mesh.cp_heads ({degree})" if mesh.cp_heads else f"mesh.cp ({mesh.cp})"
        yield (
            f"{key} must divide model.num_heads ({model.num_heads}) / {_factors(mesh, 'tp')} = "
            f"{heads}{_divisors(degree, heads, name='mesh.cp_heads = ')}"
        )
    halves = 2 if degree < mesh.cp else 1
    if seq_len % (mesh.cp * halves) or seq_len // mesh.cp % mesh.tp:
        unit = math.lcm(mesh.cp * halves, mesh.cp * mesh.tp)
        twice = "2 x " if halves == 2 else ""
        yield (
            f"data.seq_len ({seq_len}) must be a multiple of "
            f"{twice}{_factors(mesh, 'cp', 'tp')}{_multiples(seq_len, unit)}"
        )


def _pipeline(config: Config) -> Iterator[str]:
    mesh, pipeline, model = config.mesh, config.pipeline, config.model
    num_stages = count_stages(config)
    only = KINDS[pipeline.schedule].stages_per_rank
    if only and pipeline.stages_per_rank != only:
        yield (
            f"pipeline.stages_per_rank ({pipeline.stages_per_rank}) must be {only} "
            f"with pipeline.schedule ({shown(pipeline.schedule)})"
        )
    more = " + 1" if KINDS[pipeline.schedule].returns else ""
    if model.num_layers < num_stages:
        yield (
            f"model.num_layers ({model.num_layers}) must be at least mesh.pp ({mesh.pp}) x "
            f"pipeline.stages_per_rank ({pipeline.stages_per_rank}){more} = {num_stages}"
        )
    kind, sizes = KINDS[pipeline.schedule], mesh.stage_tp
    comes_back = kind.returns or kind.stages_per_rank == 2
    if model.tie_embeddings and not comes_back and sizes and sizes[0] != sizes[-1]:
        yield (
            f"model.tie_embeddings (true) must be false with mesh.stage_tp ({shown(sizes)}): the "
            f"first size ({sizes[0]}) must equal the last ({sizes[-1]})"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    yield from _attention(model)
    yield from _rotary(model)
    yield from _experts(model)
    if model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers ({model.num_dense_layers}) must be at most "
            f"model.num_layers ({model.num_layers})"
        )
    if 0 < model.max_positions < config.data.seq_len:
        yield (
            f"data.seq_len ({config.data.seq_len}) must be at most "
            f"model.max_positions ({model.max_positions})"
        )
    if model.num_mtp_modules >= config.data.seq_len:
        yield (
            f"model.num_mtp_modules ({model.num_mtp_modules}) must be less than "
            f"data.seq_len ({config.data.seq_len})"
        )


_GQA_ONLY = ("qk_norm", "attention_bias", "attention_sinks")


def _attention(model: ModelConfig) -> Iterator[str]:
    heads = f"model.num_heads ({model.num_heads})"
    if model.attention == "mla":
        for key in _GQA_ONLY:
            if getattr(model, key):
                yield f'model.{key} (true) must be false with model.attention ("mla")'
        if model.rope_head_dim % 2:
            yield f"model.rope_head_dim ({model.rope_head_dim}) must be even"
    else:
        if model.num_heads % model.num_kv_heads:
            yield (
                f"model.num_kv_heads ({model.num_kv_heads}) must divide {heads}"
                f"{_divisors(model.num_kv_heads, model.num_heads)}"
            )
        if model.head_dim % 2:
            yield f"model.head_dim ({model.head_dim}) must be even"
        if model.head_dim == 0 and model.dim % (2 * model.num_heads):
            yield (
                f"model.dim ({model.dim}) must be a multiple of 2 x {heads} where model.head_dim "
                f"is 0{_multiples(model.dim, 2 * model.num_heads)}"
            )
    if model.full_attention_every and not model.sliding_window:
        yield (
            f"model.full_attention_every ({model.full_attention_every}) must be 0 "
            f"with model.sliding_window (0)"
        )


def _rotary(model: ModelConfig) -> Iterator[str]:
    if model.rope_scaling == "llama3" and model.rope_low_factor >= model.rope_high_factor:
        yield (
            f"model.rope_low_factor ({model.rope_low_factor:g}) must be less than "
            f"model.rope_high_factor ({model.rope_high_factor:g})"
        )
    if model.rope_scaling == "yarn" and model.rope_beta_slow >= model.rope_beta_fast:
        yield (
            f"model.rope_beta_slow ({model.rope_beta_slow:g}) must be less than "
            f"model.rope_beta_fast ({model.rope_beta_fast:g})"
        )
    if model.rope_scaling == "none" and model.rope_factor != 1.0:
        yield (
            f'model.rope_factor ({model.rope_factor:g}) must be 1 with model.rope_scaling ("none")'
        )


def _experts(model: ModelConfig) -> Iterator[str]:
    experts, groups, limited = model.num_experts, model.num_expert_groups, model.num_limited_groups
    if experts == 0:
        return
    if model.top_k > experts:
        yield f"model.top_k ({model.top_k}) must be at most model.num_experts ({experts})"
    if experts % groups:
        yield (
            f"model.num_expert_groups ({groups}) must divide model.num_experts ({experts})"
            f"{_divisors(groups, experts)}"
        )
        return
    if limited > groups:
        yield (
            f"model.num_limited_groups ({limited}) must be at most "
            f"model.num_expert_groups ({groups})"
        )
    elif limited * (experts // groups) < model.top_k:
        yield (
            f"model.top_k ({model.top_k}) must be at most model.num_limited_groups ({limited}) x "
            f"{experts // groups} experts of a group"
        )
    if limited < groups and experts // groups < 2:
        yield (
            f"model.num_expert_groups ({groups}) must be at most model.num_experts ({experts}) / 2"
        )


def _batches(config: Config) -> Iterator[str]:
    train, mesh = config.train, config.mesh
    unit = mesh.dp_replicate * mesh.dp_shard * train.microbatch_size
    if train.global_batch_size % unit:
        yield (
            f"train.global_batch_size ({train.global_batch_size}) must be a multiple of "
            f"{_factors(mesh, *_DATA_AXES)} x train.microbatch_size ({train.microbatch_size}) = "
            f"{unit}"
            f"{_multiples(train.global_batch_size, unit)}"
        )
    if train.sample_tokens and not train.sample_prompt:
        yield (
            'train.sample_prompt ("") must not be empty '
            f"with train.sample_tokens ({train.sample_tokens})"
        )


def _saving(config: Config) -> Iterator[str]:
    often, kept = config.train.save_every, config.train.keep_every
    if kept and (often == 0 or kept % often):
        hint = _multiples(kept, often) if often else ""
        yield f"train.keep_every ({kept}) must be a multiple of train.save_every ({often}){hint}"


def _overlap(config: Config) -> Iterator[str]:
    if not config.pipeline.overlap:
        return
    mesh, pipeline, model, train = config.mesh, config.pipeline, config.model, config.train
    must_be_off = "pipeline.overlap (true) must be false with"
    if KINDS[pipeline.schedule].pairs is None:
        having = " or ".join(name for name, kind in KINDS.items() if kind.pairs)
        yield (
            f"{must_be_off} pipeline.schedule ({shown(pipeline.schedule)}): only {having} can have "
            "a forward and a backward as one step"
        )
    if max(mesh.stage_ep, default=mesh.ep) == 1:
        yield f"{must_be_off} mesh.ep (1): experts of one rank exchange nothing to be hidden"
    if mesh.etp > 1:
        yield (
            f"{must_be_off} mesh.etp ({mesh.etp}): parts of an expert's output are summed before "
            "their exchange returns, which would be waited for"
        )
    if not model.has_experts:
        yield (
            f"{must_be_off} model.num_experts ({model.num_experts}) and model.num_dense_layers "
            f"({model.num_dense_layers}): no layer has experts"
        )
    unit = mesh.dp_replicate * mesh.dp_shard * train.microbatch_size
    if train.global_batch_size == unit:
        yield (
            f"{must_be_off} train.global_batch_size ({train.global_batch_size}) = "
            f"{_factors(mesh, *_DATA_AXES)} x train.microbatch_size ({train.microbatch_size}): one "
            "microbatch has no other one to hide behind"
        )


def _files(config: Config) -> Iterator[str]:
    run, data = config.run, config.data
    for path in data.paths:
        if not _exists(path):
            yield f"data.paths ({_path(path)}) must exist{_neighbour(path)}"
    if data.tokenizer and not _is_file(data.tokenizer):
        yield f"data.tokenizer ({_path(data.tokenizer)}) must be a file{_neighbour(data.tokenizer)}"
    if run.init_from and not _is_file(f"{run.init_from}/config.json"):
        yield (
            f"run.init_from ({_path(run.init_from)}) must be a folder with a config.json"
            f"{_neighbour(run.init_from)}"
        )
    if run.resume:
        require_run_directory(run.resume)
    target = run.resume or run.output_dir
    key = "run.resume" if run.resume else "run.output_dir"
    problem = _not_writable(target)
    if problem:
        yield f"{key} ({_path(target)}) must be a writable folder: {problem}"


def _extras(config: Config) -> Iterator[str]:
    needs = {"tensorboard": ("run.tensorboard", config.run.tensorboard)}
    needs["tokenizers"] = ("data.tokenizer", bool(config.data.tokenizer))
    for extra, (key, is_wanted) in needs.items():
        if is_wanted and importlib.util.find_spec(extra) is None:
            yield f"{key} needs the extra {extra}: pip install 'hp-train[{extra}]'"


def _not_writable(path: str) -> str:
    """Why nothing can be made in a folder, or in the nearest one above it that exists."""
    if not path or "\0" in path:
        return "no such name"
    folder = Path(path).absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    except OSError as error:
        return error.strerror or "not accessible"
    if not folder.is_dir():
        return f"{_path(str(folder))} is a file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{_path(str(folder))} is not writable"
    return ""


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def _path(path: str) -> str:
    return shown(path, limit=250)


def _neighbour(path: str) -> str:
    """A file of a similar name in the same folder, as a hint."""
    try:
        folder, name = os.path.split(path.rstrip("/"))
        siblings = [entry.name for entry in Path(folder or ".").iterdir()]
        return "" if name in siblings else did_you_mean(name, siblings)
    except (OSError, ValueError):
        return ""


def _factors(mesh: MeshConfig, *axes: str) -> str:
    """Axes and their sizes as a product; those of one rank are left out but for pp."""
    sizes = {axis: getattr(mesh, axis) for axis in axes}
    shown_axes = [axis for axis, size in sizes.items() if size > 1 or axis == "pp"]
    return " x ".join(f"{_key(mesh, axis)} ({sizes[axis]})" for axis in shown_axes or axes[:1])


def _key(mesh: MeshConfig, axis: str) -> str:
    """The key that an axis has its size from."""
    is_listed = axis in ("tp", "ep") and getattr(mesh, f"stage_{axis}")
    return f"mesh.stage_{axis}" if is_listed else f"mesh.{axis}"


def _product(mesh: MeshConfig, *axes: str) -> str:
    factors = _factors(mesh, *axes)
    total = math.prod(getattr(mesh, axis) for axis in axes)
    return f"{factors} = {total}" if " x " in factors else factors


def _fit(config: Config, num_processes: int) -> str:
    """Hint at a size of one axis with which the mesh fills the world."""
    for axis in (*_STAGE_AXES, "pp"):
        size = getattr(config.mesh, axis)
        others = config.world_size // size
        if num_processes % others == 0:
            return f"; nearest: mesh.{axis} = {num_processes // others}"
    return _divisors(config.mesh.pp, num_processes, name="mesh.pp = ")


def _divisors(value: int, of: int, *, name: str = "") -> str:
    """Hint at the divisors of a number on either side of a value that is none."""
    if of > 10**6:
        return ""
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return "; nearest: " + name + " or ".join(map(str, below + above))


def _multiples(value: int, of: int) -> str:
    """Hint at the multiples of a number on either side of a value that is none."""
    low = value // of * of
    return "; nearest: " + " or ".join(str(n) for n in (low, low + of) if n > 0)
