"""Saves that do not end well: processes killed, storage that fails."""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_checkpoint import checkpoint, files
from hp_checkpoint.runs import Loaded, load_latest, save_checkpoint
from hp_platform.testing import RankError, run_distributed

NOBODY = 65534


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def state(step: int, size: int = 2000) -> dict[str, Tensor]:
    return {f"t{i}": torch.full((size,), float(100 * step + i)) for i in range(3)}


def save(path: Path, step: int, *, keep: int = 1, size: int = 2000) -> Path:
    return save_checkpoint(
        path, step=step, tensors=state(step, size), extra={"at": step}, group=world(), keep=keep
    )


def resume(path: Path) -> Loaded | None:
    """Start again in this process: a complete state or none, and nothing left of dead runs."""
    tensors = state(0)
    loaded = load_latest(path, tensors=tensors, group=world())
    if loaded is not None:
        expected = state(loaded.step)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert loaded.extra == {"at": loaded.step}
        assert not loaded.skipped
    assert not [name for name in names_in(path) if "tmp" in name or "bad" in name]
    return loaded


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


TOUCHING = ["write", "fsync", "mkdir", "open", "rename", "unlink", "rmdir", "readv", "close"]


def kill_at(countdown: int) -> None:
    """Kill this process at the n-th call that touches a file."""
    remaining = [countdown]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in TOUCHING:
        setattr(os, name, counted(getattr(os, name)))


def rank_dies_in_a_save(path: Path, victim: int, countdown: int) -> None:
    save(path, 1)
    if world().rank() == victim:
        kill_at(countdown)
    save(path, 2)
    if world().rank() == victim:
        raise AssertionError("survived")


def killed(path: Path, *, victim: int, countdown: int, world_size: int) -> bool:
    """Tell whether the victim was killed before its save was done."""
    with pytest.raises(RankError) as caught:
        run_distributed(rank_dies_in_a_save, path, victim, countdown, world_size=world_size)
    return "survived" not in str(caught.value)


@pytest.mark.usefixtures("group")
def test_a_rank_killed_anywhere_in_a_save_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    taken = []
    for countdown in range(1, 100, 4):
        path = tmp_path / str(countdown)
        died = killed(path, victim=0, countdown=countdown, world_size=1)
        loaded = resume(path)
        assert loaded is not None
        taken.append(loaded.step)
        if not died:
            break
    else:
        pytest.fail("the save has more calls than were tried")
    # At first the old one, from the rename on the new one.
    assert taken == sorted(taken)
    assert set(taken) == {1, 2}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_of_two_leaves_a_complete_checkpoint(victim: int, tmp_path: Path) -> None:
    for number, countdown in enumerate([1, 6, 13]):
        path = tmp_path / str(number)
        assert killed(path, victim=victim, countdown=countdown, world_size=2)
        assert resume(path) is not None


def rank_is_killed_some_time(path: Path, seconds: float) -> None:
    """Save again and again until all ranks are killed at once."""
    save(path, 1, keep=2)
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    for step in range(2, 10**6):
        save(path, step, keep=2)


@pytest.mark.usefixtures("group")
def test_all_ranks_killed_at_a_random_instant_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(5):
        path = tmp_path / str(number)
        with pytest.raises(RankError):
            run_distributed(rank_is_killed_some_time, path, chance.uniform(0, 0.3), world_size=2)
        assert resume(path) is not None


@pytest.mark.usefixtures("group")
def test_a_first_save_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    leftover = tmp_path / f"step-00000001.tmp-{'a' * 32}"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    assert resume(tmp_path) is None
    assert not names_in(tmp_path)


@pytest.mark.usefixtures("group")
def test_a_save_removes_what_dead_runs_left_but_not_what_a_live_one_writes(tmp_path: Path) -> None:
    dead, live = (tmp_path / f"step-00000001.tmp-{letter * 32}" for letter in "ab")
    dead.mkdir()
    live.mkdir()
    descriptor = os.open(live, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    save(tmp_path, 2)
    assert names_in(tmp_path) == [live.name, "step-00000002"] or names_in(tmp_path) == [
        "step-00000002",
        live.name,
    ]
    os.close(descriptor)
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["step-00000003"]


def failed_save(path: Path, step: int, *, size: int = 2000) -> str:
    """The message of a save that fails; the directory is as before."""
    before = names_in(path) if path.is_dir() else []
    with pytest.raises(CheckpointError) as caught:
        save(path, step, size=size)
    dist.barrier()  # the first rank removes what was written
    assert (names_in(path) if path.is_dir() else []) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rank_has_small_files(path: Path) -> list[str]:
    """A quota on the second rank only; then it is lifted."""
    save(path, 1)
    messages = []
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world().rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    for step in (2, 3):
        messages.append(failed_save(path, step, size=20_000))  # noqa: PERF401
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save(path, 4)
    return messages


@pytest.mark.usefixtures("group")
def test_a_quota_on_one_rank_fails_the_save_on_all_and_the_next_one_works(tmp_path: Path) -> None:
    one, other = run_distributed(rank_has_small_files, tmp_path, world_size=2)
    assert one == other
    for message in one:
        assert "rank 1: cannot write" in message
        assert message.endswith("rank-00001.safetensors: File too large")
    loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.step == 4


def rank_fills_the_disk(path: Path) -> list[str]:
    save(path, 1)
    messages = [failed_save(path, step, size=100_000) for step in (2, 3, 4)]
    save(path, 5)
    return messages


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of one megabyte."""
    path = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        if subprocess.run(command, check=False, capture_output=True, timeout=60).returncode:
            pytest.skip("mounting a small file system needs privileges")
        try:
            yield path
        finally:
            subprocess.run(["umount", str(path)], check=True, timeout=60)
    finally:
        path.rmdir()


@pytest.mark.usefixtures("group")
def test_a_full_disk_fails_the_save_on_all_ranks_and_the_next_one_works(small_disk: Path) -> None:
    path = small_disk / "checkpoints"
    one, other = run_distributed(rank_fills_the_disk, path, world_size=2)
    assert one == other
    assert all("No space left on device" in message for message in one)
    loaded = resume(path)
    assert loaded is not None
    assert loaded.step == 5


def rank_may_not_write(path: Path) -> list[str]:
    """As a user without any privileges: in a new directory, in one that cannot be written, out."""
    save(path, 1)
    if world().rank() == 0:
        path.chmod(0o555)
        path.parent.chmod(0o555)
    dist.barrier()
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    messages = [failed_save(path, 2), failed_save(path.parent / "new", 2)]
    tensors = state(0)
    loaded = load_latest(path, tensors=tensors, group=world())
    assert loaded is not None
    assert loaded.step == 1
    return messages


def test_a_read_only_directory_fails_the_save_on_all_ranks_and_can_be_loaded_from() -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        one, other = run_distributed(rank_may_not_write, parent / "checkpoints", world_size=2)
    finally:
        for path in (parent, parent / "checkpoints"):
            path.chmod(0o755)
        shutil.rmtree(parent)
    assert one == other
    assert all("cannot create a checkpoint in" in message for message in one)
    assert all(message.endswith("Permission denied") for message in one)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["write", "fsync", "mkdir", "rename", "open"])
def test_an_io_error_of_any_call_keeps_the_previous_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    original = getattr(os, name)
    for number in range(1, 30):
        remaining = [number]

        def failing(*args: Any, remaining: list[int] = remaining, **kwargs: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                save(tmp_path, number + 1, keep=3)
            except CheckpointError as error:
                assert "Input/output error" in str(error)  # noqa: PT017  # it may also succeed
        if remaining[0] > 0:
            break
    else:
        pytest.fail("more calls than were tried")
    assert number > 1
    assert resume(tmp_path) is not None


@pytest.mark.usefixtures("group")
def test_storage_that_changes_what_is_written_never_becomes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    original = os.write

    def lying(descriptor: int, data: memoryview) -> int:
        if len(data) > 4000:
            data = memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
        return original(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lying)
        message = failed_save(tmp_path, 2)
    assert "was not written well: rank-00000.safetensors: tensor t0 is damaged" in message
    loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.step == 1


@pytest.mark.usefixtures("group")
def test_data_that_change_after_verification_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    spans = iter(["0" * 64])
    original = files.hash_span

    def changed(*args: Any, keep: bool = False) -> str:
        return next(spans) if keep else original(*args)

    monkeypatch.setattr(checkpoint, "hash_span", changed)
    with pytest.raises(
        CheckpointError, match=r"tensor t0 changed after it was verified; the state"
    ):
        load_latest(tmp_path, tensors=state(0), group=world())
