"""What is set for CUDA and NCCL, and that what a user has set stays."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_schedule import add_send_recv, validate
from hp_trainer.config import Config
from hp_trainer.config.options import with_keys
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import KINDS
from hp_trainer.training.startup import (
    Versions,
    apply_gpu_settings,
    gpu_settings,
    gpu_settings_in_force,
    with_gpu_settings,
)
from hp_trainer.training.train import banner

NEW = Versions(nccl=(2, 29), cuda=(13, 0), driver=(13, 0))
STAGES = with_keys(Config(), {"mesh.pp": 2})
ALONE = with_keys(Config(), {"mesh.pp": 1, "mesh.dp_replicate": 4})


def test_all_ranks_of_one_stage_launch_in_one_order() -> None:
    assert gpu_settings(ALONE, {}, NEW) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }


@pytest.mark.parametrize(
    "versions",
    [
        NEW._replace(nccl=(2, 25)),
        NEW._replace(cuda=(12, 2)),
        NEW._replace(driver=(12, 2)),
        NEW._replace(driver=(0, 0)),
    ],
)
def test_an_order_that_nccl_cannot_keep_while_kernels_overlap_is_not_asked_for(
    versions: Versions,
) -> None:
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in gpu_settings(ALONE, {}, versions)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.returns])
def test_the_order_in_which_ranks_of_a_pipeline_launch_has_no_cycle(name: str) -> None:
    """Why it is set there: the default of `validate` asks for more than NCCL's order does."""
    config = with_keys(STAGES, {"pipeline.schedule": name})
    assert gpu_settings(config, {}, NEW)["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    kind = KINDS[name]
    for pp, microbatches in ((2, 4), (4, 8), (8, 16)):
        schedule = kind.build(pp, microbatches, kind.stages_per_rank or 2)
        assert validate(add_send_recv(schedule)), f"{name} of {pp} ranks"


def test_threads_of_their_own_launch_in_no_order_that_could_be_kept() -> None:
    for keys in ({"mesh.stage_tp": (1, 2)}, {"pipeline.schedule": "u_shape"}):
        assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in gpu_settings(with_keys(STAGES, keys), {}, NEW)


@pytest.mark.parametrize("keys", [{"mesh.stage_tp": (1, 2)}, {"pipeline.schedule": "u_shape"}])
def test_modules_are_loaded_early_where_a_second_thread_launches(keys: dict[str, Any]) -> None:
    config = with_keys(STAGES, keys)
    assert gpu_settings(config, {}, NEW)["CUDA_MODULE_LOADING"] == "EAGER"
    assert "CUDA_MODULE_LOADING" not in gpu_settings(STAGES, {}, NEW)
    assert "CUDA_MODULE_LOADING" not in gpu_settings(config, {"CUDA_MODULE_LOADING": "LAZY"}, NEW)
    assert with_gpu_settings({}, config)["CUDA_MODULE_LOADING"] == "EAGER"
    assert (
        with_gpu_settings({"CUDA_MODULE_LOADING": "LAZY"}, config)["CUDA_MODULE_LOADING"] == "LAZY"
    )
    assert "CUDA_MODULE_LOADING" not in with_gpu_settings({}, STAGES)
    assert gpu_settings_in_force({"CUDA_MODULE_LOADING": "EAGER"}) == ["CUDA_MODULE_LOADING=EAGER"]


def test_a_dry_run_knows_whether_nccl_will_keep_the_order() -> None:
    uneven, off = with_keys(STAGES, {"mesh.stage_tp": (1, 2)}), {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    order = "NCCL_LAUNCH_ORDER_IMPLICIT"
    assert with_gpu_settings({}, STAGES)[order] == "1"
    assert with_gpu_settings(off, STAGES)[order] == "0"
    assert order not in with_gpu_settings({}, uneven)
    assert with_gpu_settings({order: "1"}, uneven)[order] == "1"


def test_a_dry_run_knows_whether_segments_will_grow() -> None:
    growing = "expandable_segments:True"
    assert with_gpu_settings({}, ALONE)["PYTORCH_ALLOC_CONF"] == growing
    for own in ("max_split_size_mb:512", ""):
        assert with_gpu_settings({"PYTORCH_ALLOC_CONF": own}, ALONE)["PYTORCH_ALLOC_CONF"] == own
    registering = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    assert "PYTORCH_ALLOC_CONF" not in with_gpu_settings(registering, ALONE)


@pytest.mark.parametrize("allocator", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(allocator: str) -> None:
    given = {allocator: "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    assert gpu_settings(ALONE, given, NEW) == {}
    assert gpu_settings_in_force(given) == [
        f"{allocator}=",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "NCCL_LAUNCH_ORDER_IMPLICIT=0",
    ]


def test_segments_that_nccl_is_to_register_do_not_grow() -> None:
    given = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    assert "PYTORCH_ALLOC_CONF" not in gpu_settings(ALONE, given, NEW)


def test_a_run_on_the_cpu_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    apply_gpu_settings(with_keys(ALONE, {"launch.device": "cpu"}), env)
    assert env == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    apply_gpu_settings(ALONE, env)
    assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in env, "this machine has no driver"
    late: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    apply_gpu_settings(ALONE, late)
    assert late == {}, "what is read no more is not said to be in force"


def test_the_first_lines_of_a_run_on_gpus_say_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

    def last_line(device: str) -> str:
        info = SimpleNamespace(world_size=4)
        place = SimpleNamespace(type=device)
        runtime: Any = SimpleNamespace(info=info, device=place, backend="nccl")
        mesh: Any = SimpleNamespace(layout=Layout.of(ALONE.mesh))
        norm: Any = SimpleNamespace(sizes={"a": 10})
        return banner(ALONE, mesh, runtime, norm)[-1]

    assert last_line("cuda") == "gpu    PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert last_line("cpu").startswith("batch ")
