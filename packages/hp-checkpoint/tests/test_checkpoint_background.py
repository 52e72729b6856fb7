"""Saving behind the training: what is saved, when it is known to be, and what a kill leaves."""

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hp_base.errors import CheckpointError
from hp_checkpoint import files
from hp_checkpoint.runs import BackgroundSaver, load_latest, save_checkpoint
from hp_platform import new_group
from hp_platform.testing import RankError, run_distributed


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory that no disk slows down, where there is one."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as path:
        yield Path(path)


def own_group() -> ProcessGroup:
    group = new_group([range(dist.get_world_size())], name="checkpoint", backend="gloo")
    assert group is not None
    return group


def state(step: int) -> dict[str, Tensor]:
    """Return the tensors of 'training' after a step: every value is the step."""
    tensors = {f"t{i}": torch.full((3000,), float(step)) for i in range(4)}
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tensors["cut"] = distribute_tensor(torch.full((64, 8), float(step)), mesh, [Shard(0)])
    return tensors


def train(tensors: dict[str, Tensor]) -> None:
    """The next step: what an optimizer does to weights in place."""
    for tensor in tensors.values():
        tensor.add_(1)


def loaded_step(path: Path) -> int:
    """The one step that all values of the newest checkpoint come from; 0: there is none."""
    tensors = state(0)
    loaded = load_latest(path, tensors=tensors, group=world())
    if loaded is None:
        return 0
    for name, tensor in tensors.items():
        local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert local.unique().tolist() == [float(loaded.step)], name
    assert not loaded.skipped
    assert not [p for p in path.iterdir() if "tmp" in p.name or "bad" in p.name]
    return loaded.step


def rank_trains_on_while_it_saves(path: Path, saves: int) -> None:
    saver = BackgroundSaver(path, group=own_group(), keep=1)
    tensors = state(0)
    for step in range(1, saves + 1):
        train(tensors)
        saver.start(step=step, tensors=tensors, extra={"at": step})
        values = {name: tensor.clone() for name, tensor in tensors.items()}
        while not saver.is_written:  # step after step in place, while the thread writes
            for tensor in tensors.values():
                tensor.mul_(-1.5)
        saver.finish()
        for name, value in values.items():
            tensors[name].copy_(value)
        assert loaded_step(path) == step


@pytest.mark.parametrize(("world_size", "saves"), [(1, 20), (2, 4)])
def test_what_is_saved_is_the_state_at_the_call_whatever_training_does_next(
    world_size: int, saves: int, in_memory: Path
) -> None:
    run_distributed(rank_trains_on_while_it_saves, in_memory, saves, world_size=world_size)


def test_one_save_is_under_way_at_a_time(tmp_path: Path, group: ProcessGroup) -> None:
    saver = BackgroundSaver(tmp_path, group=group, keep=1)
    with pytest.raises(RuntimeError, match="must be started before it is finished"):
        saver.finish()
    saver.start(step=1, tensors=state(1), extra={})
    with pytest.raises(RuntimeError, match="must be finished before another one"):
        saver.start(step=2, tensors=state(2), extra={})
    assert saver.is_under_way
    assert saver.finish().name == "step-00000001"
    assert not saver.is_under_way
    assert not saver.is_written


def test_a_save_is_told_of_while_it_is_waited_for(
    tmp_path: Path, group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = BackgroundSaver(tmp_path, group=group, keep=1)
    release = threading.Event()
    told: list[str] = []

    write = files.write

    def slow(*args: Any) -> None:
        release.wait(30)
        write(*args)

    def tell(phase: str, **_: object) -> None:
        told.append(phase)
        if phase == "write":
            release.set()

    monkeypatch.setattr(files, "write", slow)
    saver.start(step=1, tensors=state(1), extra={})
    time.sleep(0.1)
    assert not saver.is_written
    saver.finish(on_progress=tell)
    assert "write" in told


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def rank_one_cannot_write(path: Path) -> list[str]:
    """Three saves, the second of which fails on rank 1 alone."""
    saver = BackgroundSaver(path, group=own_group(), keep=1)
    outcomes = []
    for step in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            if step == 2 and world().rank() == 1:
                patch.setattr(files, "write", full_disk)
            saver.start(step=step, tensors=state(step), extra={})
            try:
                outcomes.append(saver.finish().name)
            except CheckpointError as error:
                outcomes.append(str(error))
        dist.barrier()
    outcomes.append(str(loaded_step(path)))
    return outcomes


def test_a_full_disk_on_one_rank_is_told_to_all_and_the_next_save_works(tmp_path: Path) -> None:
    one, other = run_distributed(rank_one_cannot_write, tmp_path, world_size=2)
    assert one == other
    assert (one[0], one[2], one[3]) == ("step-00000001", "step-00000003", "3")
    assert one[1].startswith("rank 1: cannot write ")
    assert one[1].endswith("No space left on device")


def rank_cannot_copy(path: Path) -> str:
    tensors = state(1)
    if world().rank() == 1:
        tensors["t0"] = torch.empty(2, device="meta")
    saver = BackgroundSaver(path, group=own_group(), keep=1)
    saver.start(step=1, tensors=tensors, extra={})
    with pytest.raises(CheckpointError) as caught:
        saver.finish()
    return str(caught.value)


def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    one, other = run_distributed(rank_cannot_copy, tmp_path, world_size=2)
    assert "rank 1 failed before saving a checkpoint: CheckpointError: cannot copy" in one
    assert "cannot copy the state to host memory" in other


def rank_is_killed_while_it_trains_and_saves(path: Path, seconds: float) -> None:
    save_checkpoint(path, step=1, tensors=state(1), extra={}, group=world(), keep=2)
    saver = BackgroundSaver(path, group=own_group(), keep=2)
    tensors = state(1)
    threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
    for step in range(2, 10_000):
        train(tensors)
        if saver.is_under_way:
            saver.finish()
        saver.start(step=step, tensors=tensors, extra={})
    raise AssertionError("survived")


@pytest.mark.usefixtures("group")
def test_a_kill_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path) -> None:
    generator, taken = random.Random(3), []
    for number in range(8):
        path = tmp_path / str(number)
        with pytest.raises(RankError, match="SIGKILL"):
            run_distributed(
                rank_is_killed_while_it_trains_and_saves,
                path,
                generator.uniform(0.0, 0.25),
                world_size=1,
            )
        taken.append(loaded_step(path))
        shutil.rmtree(path)
    assert min(taken) >= 1
    assert max(taken) > 2  # kills came after some saves behind the training


def rank_saves_many_times(path: Path) -> tuple[int, int, int]:
    """Growth over 300 saves of a rank's own memory in bytes, of descriptors, of threads."""

    def usage() -> tuple[int, int, int]:
        # Pages of files are shared, and count as they are read: they are left out.
        status = Path("/proc/self/status").read_text()
        own = int(status.split("RssAnon:")[1].split()[0]) * 1024
        files = len(list(Path("/proc/self/fd").iterdir()))
        return own, files, threading.active_count()

    saver = BackgroundSaver(path, group=own_group(), keep=1)
    tensors = state(0)
    before = (0, 0, 0)
    for step in range(400):
        if step == 100:  # the heaps of the threads have grown to their size by now
            before = usage()
        saver.start(step=step, tensors=tensors, extra={})
        saver.finish()
    one, two, three = (b - a for a, b in zip(before, usage(), strict=True))
    return one, two, three


def test_memory_stays_level_over_many_saves(in_memory: Path) -> None:
    # In a process of its own: pytest keeps every log record of torch.
    [(memory, files, threads)] = run_distributed(rank_saves_many_times, in_memory, world_size=1)
    assert memory < 2_000_000
    assert (files, threads) == (0, 0)
