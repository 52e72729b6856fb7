"""How FSDP gathers is decided before ranks start, from what the driver says of the GPUs."""

import os
from pathlib import Path

import pytest

from hp_train.gathering import VisibleGpu, machine_of, visible_gpus, with_gather_decided
from hp_trainer.config.options import Resolved, resolve

H100 = "NVIDIA H100 80GB HBM3"
TWO = f"0, GPU-aa11, {H100}, 81559\n1, GPU-bb22, {H100}, 40000\n"


def driver(folder: Path, answer: str, status: int = 0) -> dict[str, str]:
    """Make a program that answers as the driver's does; returns an environment that has it."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{answer}'\nexit {status}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def config(*keys: tuple[str, object]) -> Resolved:
    return resolve(
        "debug-llama3",
        [("mesh.pp", 1), ("mesh.dp_replicate", 1), ("mesh.dp_shard", 2), ("mesh.tp", 1), *keys],
        env={},
    )


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (None, [81559, 40000]),
        ("1", [40000]),
        ("1,0", [40000, 81559]),
        ("GPU-bb", [40000]),
        ("", []),
        ("MIG-1234", []),
        ("7", []),
    ],
)
def test_the_gpus_are_those_that_a_process_may_use(
    tmp_path: Path, visible: str | None, memories: list[int]
) -> None:
    env = driver(tmp_path, TWO) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.memory / 2**20 for gpu in visible_gpus(env)] == memories


@pytest.mark.parametrize(
    ("answer", "status"), [("", 9), ("no devices", 0), ("0, GPU-aa, x, [N/A]", 0)]
)
def test_where_the_driver_does_not_tell_there_are_none(
    tmp_path: Path, answer: str, status: int
) -> None:
    assert visible_gpus(driver(tmp_path, answer, status)) == []
    assert visible_gpus({"PATH": str(tmp_path / "nothing")}) == []


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    resolved = config()
    gpus = [VisibleGpu(H100, 8e10), VisibleGpu(H100, 6e10)]
    assert machine_of(resolved.config, gpus, {}).memory == 6e10
    assert machine_of(resolved.config, gpus[:1], {}).memory == 4e10
    under_torchrun = machine_of(resolved.config, gpus[:1], {"LOCAL_WORLD_SIZE": "1"})
    assert (under_torchrun.memory, under_torchrun.node_size) == (8e10, 1)


def test_the_word_is_in_the_config_that_ranks_get(tmp_path: Path) -> None:
    env = driver(tmp_path, TWO)
    decided = with_gather_decided(config(), env)
    assert decided.config.mesh.gather in ("stage", "block")
    assert decided.origins["mesh.gather"] == "decided at start"
    again = with_gather_decided(decided, env)
    assert again is decided


def test_nothing_is_decided_without_gpus_or_where_it_is_said(tmp_path: Path) -> None:
    env = driver(tmp_path, TWO)
    for resolved in (config(("mesh.gather", "block")), config(("launch.device", "cpu"))):
        assert with_gather_decided(resolved, env) is resolved
    open_ = config()
    assert with_gather_decided(open_, driver(tmp_path, "", 9)) is open_
