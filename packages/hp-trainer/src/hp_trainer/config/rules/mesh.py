"""Sizes of the mesh: those that fill the processes, and those that divide what they share out."""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from hp_base.environment import World
from hp_base.messages import shown
from hp_trainer.config import MOST_EXPERTS, MOST_LAYERS, Config, MeshConfig
from hp_trainer.config.rules.hints import (
    STAGE_AXES,
    near_divisors,
    near_multiples,
    shown_factors,
    shown_product,
)
from hp_trainer.layout.ranks import StageLayout
from hp_trainer.layout.schedules import count_stages


def mesh_rules(config: Config, world: World | None) -> Iterator[str]:
    """Yield which sizes of the mesh do not fill the processes, or divide what they share out."""
    mesh, num_processes = config.mesh, config.launch.num_processes
    remedy = "" if world is None else world.remedy
    if world is not None:
        if num_processes not in (0, world.size):
            yield f"launch.num_processes ({num_processes}) must equal {world}{remedy}"
        num_processes = world.size
    if num_processes not in (0, config.world_size):
        place = str(world) if world is not None else f"launch.num_processes ({num_processes})"
        product = shown_product(mesh, "pp", *STAGE_AXES)
        hint = _fit(config, num_processes)
        if mesh.stage_tp:
            ranks = f"mesh.stage_tp ({shown(mesh.stage_tp)}) of {sum(mesh.stage_tp)} ranks"
            others = shown_factors(mesh, *STAGE_AXES[:-1])
            product, hint = f"{ranks} x {others} = {config.world_size}", ""
        yield f"{product} must equal {place}{hint}{remedy}"
    if config.model.is_own:
        yield from _own_model(config)
    for stage_mesh in _stage_meshes(mesh):
        here = config if stage_mesh is mesh else replace(config, mesh=stage_mesh)
        yield from _expert_ranks(here)
        yield from _tensor_ranks(here)
        yield from _context_ranks(here)
    if mesh.gather == "block":
        stages = [StageLayout.of(each, tp=each.tp, ep=each.ep) for each in _stage_meshes(mesh)]
        if not any(stage.is_sharded for stage in stages):
            yield (
                f"mesh.gather ({shown(mesh.gather)}) must be {shown('stage')} with mesh.dp_shard "
                f"({mesh.dp_shard}): nothing is sharded"
            )


def stage_list_rules(mesh: MeshConfig) -> Iterator[str]:
    """Yield what is wrong with sizes of single stages."""
    for name in ("tp", "ep"):
        sizes, shared = getattr(mesh, f"stage_{name}"), getattr(mesh, name)
        if not sizes:
            continue
        if len(sizes) != mesh.pp:
            given = f"mesh.stage_{name} ({shown(sizes)})"
            yield f"{given} must have a size for each of mesh.pp ({mesh.pp}) pipeline ranks"
        if shared != 1:
            yield f"mesh.{name} ({shared}) must be 1 with mesh.stage_{name} ({shown(sizes)})"


def _stage_meshes(mesh: MeshConfig) -> list[MeshConfig]:
    """Return a mesh per distinct stage, with the sizes of that stage for all."""
    if not mesh.stage_tp and not mesh.stage_ep:
        return [mesh]
    sizes = dict.fromkeys(zip(mesh.tp_sizes, mesh.ep_sizes, strict=True))
    return [replace(mesh, tp=tp, ep=ep) for tp, ep in sizes]


def _own_model(config: Config) -> Iterator[str]:
    """Yield what needs to know the inside of a block cannot be asked of one of the user's own."""
    name, tp = config.model.origin, max(config.mesh.tp_sizes)
    if tp > 1 and not config.model.transformers:
        yield f"mesh.tp ({tp}) must be 1 with {name}"
    if config.mesh.stage_tp:
        yield f"mesh.stage_tp ({shown(config.mesh.stage_tp)}) must be [] with {name}"
    if config.mesh.etp > 1 and config.model.transformers:
        yield (
            f"mesh.etp ({config.mesh.etp}) must be 1 with {name}: gate and up of an expert are one "
            "weight, of which a rank would have two pieces"
        )


def _expert_ranks(config: Config) -> Iterator[str]:
    mesh, model = config.mesh, config.model
    stage = StageLayout.of(mesh, tp=mesh.tp, ep=mesh.ep)
    ranks, replica = mesh.ep * mesh.etp, stage.fsdp * stage.tp
    if stage.num_ranks % ranks:
        hint = near_divisors(ranks, stage.num_ranks) if mesh.etp == 1 else ""
        yield f"{_experts(mesh)} must divide {shown_product(mesh, *STAGE_AXES)}{hint}"
    elif replica % ranks and ranks % replica:
        yield (
            f"{_experts(mesh)} must divide or be a multiple of "
            f"{shown_product(mesh, 'dp_shard', 'cp', 'tp')}"
        )
    if model.num_experts % mesh.ep:
        yield (
            f"{shown_factors(mesh, 'ep')} must divide model.num_experts ({model.num_experts})"
            f"{near_divisors(mesh.ep, model.num_experts)}"
        )
    yield from _expert_buffer(config)
    if model.has_experts and model.expert_hidden % mesh.etp:
        yield (
            f"mesh.etp ({mesh.etp}) must divide model.expert_hidden ({model.expert_hidden})"
            f"{near_divisors(mesh.etp, model.expert_hidden)}"
        )


def _experts(mesh: MeshConfig) -> str:
    return shown_product(mesh, "ep", "etp") if mesh.etp > 1 else shown_factors(mesh, "ep")


def _expert_buffer(config: Config) -> Iterator[str]:
    mesh, buffer = config.mesh, config.mesh.ep_buffer
    if not buffer:
        return
    must_be_off = f"mesh.ep_buffer ({buffer:g}) must be 0 with"
    if buffer < 1:
        yield f"mesh.ep_buffer ({buffer:g}) must be 0, or at least 1: an even routing needs that"
    if max(mesh.stage_ep, default=mesh.ep) == 1:
        yield f"{must_be_off} mesh.ep (1): no rows are exchanged"
    if mesh.etp > 1:
        yield f"{must_be_off} mesh.etp ({mesh.etp}): slices of tokens have no buffers"


def _tensor_ranks(config: Config) -> Iterator[str]:
    tp, model = config.mesh.tp, config.model
    if model.is_own:  # its heads and hidden widths are not known
        return
    cut = {"num_heads": model.num_heads}
    if model.attention == "gqa":
        cut["num_kv_heads"] = model.num_kv_heads
    ranks = shown_factors(config.mesh, "tp")
    for name, size in cut.items():
        if size % tp:
            yield f"{ranks} must divide model.{name} ({size}){near_divisors(tp, size)}"
    hidden = model.dense_hidden
    part = -(-hidden // tp)  # the last rank may have less, and none may have nothing
    if model.is_dense(0) and -(-hidden // part) < tp:
        yield (
            f"{ranks} must leave each rank a part of model.dense_hidden ({hidden}): parts of "
            f"{part} are {-(-hidden // part)}{near_divisors(tp, hidden)}"
        )


def _context_ranks(config: Config) -> Iterator[str]:
    mesh, model, seq_len = config.mesh, config.model, config.data.seq_len
    degree = mesh.heads_degree
    if mesh.cp % degree:
        yield (
            f"mesh.cp_heads ({degree}) must divide mesh.cp ({mesh.cp})"
            f"{near_divisors(degree, mesh.cp)}"
        )
    heads = model.num_heads // mesh.tp
    if heads % degree:
        key = f"mesh.cp_heads ({degree})" if mesh.cp_heads else f"mesh.cp ({mesh.cp})"
        yield (
            f"{key} must divide model.num_heads ({model.num_heads}) / "
            f"{shown_factors(mesh, 'tp')} = {heads}"
            f"{near_divisors(degree, heads, name='mesh.cp_heads = ')}"
        )
    if mesh.cp_deal:
        yield from _deal(config)
    halves = 2 if degree < mesh.cp and not mesh.cp_deal else 1
    if seq_len % (mesh.cp * halves) or seq_len // mesh.cp % mesh.tp:
        unit = math.lcm(mesh.cp * halves, mesh.cp * mesh.tp)
        twice = "2 x " if halves == 2 else ""
        yield (
            f"data.seq_len ({seq_len}) must be a multiple of "
            f"{twice}{shown_factors(mesh, 'cp', 'tp')}{near_multiples(seq_len, unit)}"
        )


def _deal(config: Config) -> Iterator[str]:
    """Yield why sequences cannot be dealt out to context-parallel ranks one by one."""
    mesh = config.mesh
    if mesh.heads_degree == mesh.cp:
        yield (
            f"mesh.cp_deal (true) must be false with mesh.cp ({mesh.cp}) and mesh.cp_heads "
            f"({mesh.cp_heads}): ranks that all share heads have all positions each"
        )
    if config.data.documents != "separate":
        shown_value = f'data.documents ("{config.data.documents}")'
        yield f'{shown_value} must be "separate" with mesh.cp_deal (true)'


def _fit(config: Config, num_processes: int) -> str:
    """Hint at a size of one axis with which the mesh fills the world."""
    for axis in (*STAGE_AXES, "pp"):
        others = config.world_size // getattr(config.mesh, axis)
        if num_processes % others == 0:
            return f"; nearest: mesh.{axis} = {num_processes // others}"
    return near_divisors(config.mesh.pp, num_processes, name="mesh.pp = ")


_MOST_PROCESSES = 65_536
# Steps, and ranks: a trace of a large model has 100 MB before it is packed.
_MOST_PROFILED = 16
_MOST_STEPS_OF_STAGES = 1_000_000  # forwards of all stages in one step of training


def size_rules(config: Config) -> Iterator[str]:
    """Yield which sizes are too large for what is made in proportion to them later."""
    model, train = config.model, config.train
    if config.world_size > _MOST_PROCESSES:
        yield f"processes of the mesh ({config.world_size}) must be at most {_MOST_PROCESSES}"
    layers = model.num_layers + model.num_mtp_modules
    if layers > MOST_LAYERS:
        yield (
            f"model.num_layers ({model.num_layers}) + model.num_mtp_modules "
            f"({model.num_mtp_modules}) must be at most {MOST_LAYERS}"
        )
    elif layers * model.num_experts > MOST_EXPERTS:
        yield (
            f"model.num_experts ({model.num_experts}) x {layers} layers must be at most "
            f"{MOST_EXPERTS}"
        )
    forwards = train.global_batch_size // config.batch_unit * count_stages(config)
    if forwards > _MOST_STEPS_OF_STAGES:
        yield (
            f"microbatches of train.global_batch_size ({train.global_batch_size}) in "
            f"{count_stages(config)} stages ({forwards} forwards) must be at most "
            f"{_MOST_STEPS_OF_STAGES}"
        )
    yield from _profile_rules(config)


def _profile_rules(config: Config) -> Iterator[str]:
    """Yield which profiles are too many, or of no rank."""
    train = config.train
    for key, values in (("profile", train.profile), ("profile_ranks", train.profile_ranks)):
        if len(values) > _MOST_PROFILED:
            yield f"train.{key} ({len(values)} of them) must be at most {_MOST_PROFILED}"
    last = max(train.profile_ranks, default=0)
    if train.profile and last >= config.world_size:
        size = config.world_size
        yield f"train.profile_ranks ({last}) must be below the processes of the mesh ({size})"
