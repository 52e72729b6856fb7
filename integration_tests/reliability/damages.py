"""Checkpoints that are damaged in every way; all of it is found, and the one before is taken."""

import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor

from hp_checkpoint.runs import load_latest, save_checkpoint
from hp_platform.testing import run_distributed
from integration_tests.reliability.outcome import Outcome

_OTHERS = ("empty", "half", "one byte less", "one byte more", "deleted", "swapped", "zeros")


def run(flips: int, others: int, *, seed: int) -> Outcome:
    """Flip single bits, seen by one rank, and do greater damages, seen by two; one at a time."""
    began = time.monotonic()
    failures: list[str] = []
    done: dict[str, int] = {}
    for world_size, count, kinds in ((1, flips, ("bit",)), (2, others, _OTHERS)):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            results = run_distributed(
                _rank, Path(folder), count, kinds, seed, world_size=world_size, timeout=1200
            )
        failures += results[0][0]
        done |= results[0][1]
    notes = [", ".join(f"{how} {times}" for how, times in sorted(done.items()))]
    return Outcome("damages", flips + others, failures, time.monotonic() - began, notes)


def _memory() -> str | None:
    """Where files cost no disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(40, 30, generator=generator),
        "model.half": torch.randn(300, generator=generator).to(torch.bfloat16),
        "optimizer.exp_avg.w": torch.randn(40, 30, generator=generator),
        "optimizer.exp_avg_sq.w": torch.rand(40, 30, generator=generator),
    }


def _rank(
    folder: Path, count: int, kinds: Sequence[str], seed: int
) -> tuple[list[str], Mapping[str, int]]:
    """Damage the newer of two checkpoints and load, again and again."""
    group = dist.group.WORLD
    assert group is not None
    good = folder / "good"
    for step in (1, 2):
        save_checkpoint(good, step=step, tensors=_state(step), extra={}, group=group, keep=2)
    random, failures, done = Random(seed), [], Counter[str]()
    for number in range(count):
        how = kinds[number % len(kinds)]
        run_dir = folder / str(number)
        names = sorted(path.name for path in (good / "step-00000002").iterdir())
        name, place = random.choice(names), random.random()
        if group.rank() == 0:
            shutil.copytree(good, run_dir)
            damage(run_dir, name, how, place)
        dist.barrier()
        if problem := _problem(run_dir, group):
            failures.append(f"{how} in {name} at {place:.9f}, seed {seed}: {problem}")
        done[how] += 1
        dist.barrier()
        if group.rank() == 0:
            shutil.rmtree(run_dir)
    return failures, dict(done)


def damage(run_dir: Path, name: str, how: str, place: float) -> None:
    """Damage one file of step 2; `place` from 0 to 1 says where."""
    file = run_dir / "step-00000002" / name
    size = file.stat().st_size
    if how == "bit":
        bit = math.floor(place * size * 8)
        data = bytearray(file.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    elif how == "deleted":
        file.unlink()
    elif how == "swapped":
        shutil.copy(run_dir / "step-00000001" / name, file)
    elif how == "zeros":
        data = bytearray(file.read_bytes())
        at = math.floor(place * size)
        data[at : at + 512] = bytes(len(data[at : at + 512]))
        if bytes(data) == file.read_bytes():
            data[at] ^= 1
        file.write_bytes(data)
    else:
        new = {"empty": 0, "half": size // 2, "one byte less": size - 1, "one byte more": size + 1}
        os.truncate(file, new[how])


def _problem(run_dir: Path, group: dist.ProcessGroup) -> str:
    """What is wrong with how a damage was met; empty: nothing."""
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in _state(0).items()}
    loaded = load_latest(run_dir, tensors=tensors, group=group)
    if loaded is None or loaded.step != 1:
        return f"loaded {loaded}"
    expected = _state(1)
    if not all(torch.equal(tensors[name], expected[name]) for name in expected):
        return "values of the one before differ"
    [(aside, why)] = loaded.skipped
    if aside.name != "step-00000002.bad" or not aside.is_dir() or not why or "\n" in why:
        return f"set aside as {aside}: {why!r}"
    return ""
