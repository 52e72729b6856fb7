"""The private torch symbols this package uses are there and behave as it expects."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import hp_platform
from hp_platform import _internals, initialize, shutdown


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(hp_platform.__all__) == hp_platform.__all__
    for name in hp_platform.__all__:
        assert getattr(hp_platform, name) is not None
        assert name == "__version__" or getattr(hp_platform, name).__doc__


def test_in_place_writes_are_counted() -> None:
    x = torch.ones(2)
    before = _internals.version_of(x)
    x.detach().add_(1)
    assert _internals.version_of(x) == before + 1


def test_multithreading_is_reported() -> None:
    assert _internals.is_multithreading_enabled()
    with torch.autograd.set_multithreading_enabled(False):
        assert not _internals.is_multithreading_enabled()


def test_backends_of_a_group_are_reported() -> None:
    runtime = initialize(device_type="cpu", timeout=timedelta(seconds=11))
    try:
        cpu = torch.device("cpu")
        assert _internals.backend_name(runtime.control, cpu) == "gloo"
        assert _internals.backend_name(runtime.control, torch.device("meta")) is None
        assert _internals.group_timeout(runtime.control, cpu) == timedelta(seconds=11)
        assert _internals.group_timeout(runtime.control, torch.device("meta")) is None
        assert _internals.knows_ranks(runtime.control)
        store = _internals.default_store()
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        shutdown()


def test_devices_of_gloo_are_shared_inside_the_context_alone() -> None:
    initialize(device_type="cpu", timeout=timedelta(seconds=11))
    try:
        made_by = distributed_c10d.ProcessGroupGloo
        world = dist.group.WORLD
        assert world is not None
        with suppress(KeyError), _internals.on_gloo_devices_of(world):
            assert distributed_c10d.ProcessGroupGloo is not made_by
            group = dist.new_group([0], backend="gloo", timeout=timedelta(seconds=7))
            raise KeyError
        assert distributed_c10d.ProcessGroupGloo is made_by
        assert _internals.group_timeout(group, torch.device("cpu")) == timedelta(seconds=7)
        dist.all_reduce(torch.ones(1), group=group)
    finally:
        shutdown()


def test_a_group_outside_a_world_can_be_registered_and_forgotten() -> None:
    store = _internals.HashStore()
    group = _internals.gloo_group(
        store, rank=0, world_size=1, timeout=timedelta(seconds=5), name="alone"
    )
    assert not _internals.knows_ranks(group)
    _internals.register_group("alone/0", group, [0])
    assert dist.get_process_group_ranks(group) == [0]
    assert hp_platform.all_to_all(torch.arange(2.0), group=group).tolist() == [0.0, 1.0]
    _internals.unregister_group("alone/0", group)
    assert not _internals.knows_ranks(group)


def test_the_compiler_is_not_imported_before_it_is_needed() -> None:
    """It takes seconds; exchanges, hooks and what stays outside of graphs do without."""
    program = """
import sys, torch
from hp_platform import all_to_all, agree, initialize, linear, outside_graph, shutdown, sync_hook
group = initialize(device_type="cpu").control
agree(group=group)
all_to_all(sync_hook(linear(torch.ones(2, 2), torch.ones(2, 2))), group=group)
assert outside_graph(lambda x: 2 * x)(torch.ones(1)) == 2
assert "torch._dynamo" not in sys.modules
shutdown()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
