"""Layouts as plain dictionaries, for TOML and JSON."""

from collections.abc import Mapping
from typing import TypeGuard

from hp_vtp.topology.checks import LayoutError
from hp_vtp.topology.stages import Placement, Replicated, Sharded, StageLayout

LONG_KEYS = ("chain", "stages", "world_size")
SHORT_KEYS = ("dp", "shape", "tp_sizes")
STAGE_KEYS = ("boundary", "lanes", "replicas")


def dump_layout(
    stages: tuple[StageLayout, ...], chain: tuple[int, ...], world_size: int
) -> dict[str, object]:
    """Return the long form: every stage with its ranks. It has no null, which TOML lacks."""
    return {
        "world_size": world_size,
        "chain": list(chain),
        "stages": [_dump_stage(stage) for stage in stages],
    }


def parse_long(data: Mapping[str, object]) -> tuple[tuple[StageLayout, ...], tuple[int, ...], int]:
    """Return the stages, the chain and the world size of the long form.

    Raises:
        LayoutError: With every problem of types and keys.
    """
    problems = _unknown(data, LONG_KEYS, "layout")
    stages = data.get("stages")
    if not isinstance(stages, list) or not stages:
        problems.append("layout: stages must be a non-empty list (or tp_sizes be given instead)")
        stages = []
    parsed = tuple(_parse_stage(stage, index, problems) for index, stage in enumerate(stages))
    chain = data.get("chain", list(range(len(stages))))
    if not _are_ints(chain):
        problems.append(f"layout: chain ({chain!r}) must be a list of integers")
    world_size = data.get("world_size", 0)
    if not _is_int(world_size) or world_size < 0:
        problems.append(f"layout: world_size ({world_size!r}) must be an integer of at least 0")
    if not problems and _are_ints(chain) and _is_int(world_size):
        return parsed, tuple(chain), world_size
    raise LayoutError(problems)


def parse_short(data: Mapping[str, object]) -> tuple[list[int], int | list[int], str]:
    """Return the sizes, the replicas and the shape of the short form.

    Raises:
        LayoutError: With every problem of types and keys.
    """
    problems = _unknown(data, SHORT_KEYS, "layout")
    sizes, dp, shape = data["tp_sizes"], data.get("dp", 1), data.get("shape", "straight")
    if not _are_ints(sizes):
        problems.append(f"layout: tp_sizes ({sizes!r}) must be a list of integers")
    if not _is_int(dp) and not _are_ints(dp):
        problems.append(f"layout: dp ({dp!r}) must be an integer or a list of integers")
    if shape not in {"straight", "u"}:
        problems.append(f"layout: shape ({shape!r}) must be 'straight' or 'u'")
    if not problems and _are_ints(sizes) and (_is_int(dp) or _are_ints(dp)):
        return sizes, dp, str(shape)
    raise LayoutError(problems)


def _parse_stage(data: object, index: int, problems: list[str]) -> StageLayout:
    where = f"stage {index}"
    if not isinstance(data, Mapping):
        problems.append(f"{where}: must be a table, not {type(data).__name__}")
        return StageLayout(())
    problems += _unknown(data, STAGE_KEYS, where)
    replicas = data.get("replicas")
    if not isinstance(replicas, list) or not all(_are_ints(part) for part in replicas):
        problems.append(f"{where}: replicas ({replicas!r}) must be a list of lists of integers")
        replicas = []
    lanes = data.get("lanes")
    if lanes is not None and not _is_int(lanes):
        problems.append(f"{where}: lanes ({lanes!r}) must be an integer")
        lanes = None
    boundary = _parse_boundary(data.get("boundary", "replicated"), where, problems)
    return StageLayout(tuple(tuple(part) for part in replicas), boundary, lanes)


def _parse_boundary(data: object, where: str, problems: list[str]) -> Placement:
    if data == "replicated":
        return Replicated()
    if isinstance(data, Mapping) and set(data) == {"sharded"} and _is_int(data["sharded"]):
        return Sharded(data["sharded"])
    problems.append(f"{where}: boundary ({data!r}) must be 'replicated' or {{sharded = DIM}}")
    return Replicated()


def _dump_stage(stage: StageLayout) -> dict[str, object]:
    boundary = stage.boundary
    data: dict[str, object] = {
        "replicas": [list(part) for part in stage.replicas],
        "boundary": {"sharded": boundary.dim} if isinstance(boundary, Sharded) else "replicated",
    }
    if stage.lanes is not None:
        data["lanes"] = stage.lanes
    return data


def _unknown(data: Mapping[str, object], known: tuple[str, ...], where: str) -> list[str]:
    return [
        f"{where}: unknown key {key!r}, must be one of {', '.join(known)}"
        for key in data
        if key not in known
    ]


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_int(item) for item in value)
