"""`kill -9` of any rank in any phase; the run goes on and ends with the bits of a quiet one."""

import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import torch._dynamo  # noqa: F401 - imported once by the server that ranks are forked from

from hp_base.folder import Folder
from hp_checkpoint import open_checkpoint, verify_checkpoint
from hp_checkpoint.manifest import SavedTensor
from hp_checkpoint.runs.directory import newest_checkpoint
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.launch import launcher
from hp_trainer.launch.supervise import kill_ranks
from hp_trainer.launch.task import Worker
from hp_trainer.training import train
from hp_trainer.training.metrics import read_metrics
from integration_tests.reliability.outcome import Outcome, output_to

ENTRY = "integration_tests.reliability.kills:rank"
PLAN, KILLS, STEPS = "kill-plan.json", "kills.txt", "first-steps.txt"
_PER_RUN = 12
_SAVING = "save step"  # name of the threads that save
_TOUCHING = ("write", "fsync", "mkdir", "open", "rename", "unlink", "rmdir", "readv", "close")
_KINDS = ("work", "work", "work", "beat", "save", "save", "save", "file", "time", "everyone")

TINY: Mapping[str, object] = MappingProxyType(
    {
        "launch.hang_seconds": 90,
        "launch.max_restarts": 100,
        "model.dim": 16,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.expert_hidden": 8,
        "model.num_experts": 4,
        "model.dropout": 0.1,
        "data.seq_len": 16,
        "data.eval_fraction": 0.2,
        "train.steps": 24,
        "train.global_batch_size": 8,
        "train.microbatch_size": 2,
        "train.warmup_steps": 2,
        "train.eval_every": 7,
        "train.eval_batches": 1,
        "train.save_every": 2,
        "train.sample_tokens": 0,
    }
)
LAYOUTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "fsdp 2, saves behind": {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.dp_shard": 2}
        | {"mesh.ep": 2, "pipeline.stages_per_rank": 1, "train.async_save": True},
        "pp 2, saves waited for": {"mesh.pp": 2, "mesh.dp_replicate": 1, "mesh.ep": 1}
        | {"pipeline.stages_per_rank": 1, "train.async_save": False},
        "pp 2 x dp 2 (ep 2), saves behind": {"mesh.pp": 2, "mesh.dp_replicate": 2, "mesh.ep": 2}
        | {"pipeline.stages_per_rank": 1, "train.async_save": True},
    }
)


@dataclass(frozen=True)
class Blow:
    """When somebody dies in one attempt of a run.

    Attributes:
        victim: Rank.
        kind: work: at a heartbeat outside of checkpoints; beat: at any heartbeat; save: at a call
            that touches a file in a save; file: at any such call; time: after some seconds;
            everyone: all ranks at once, at a heartbeat outside of checkpoints.
        number: Of the heartbeat or call, or milliseconds.
    """

    victim: int
    kind: str
    number: int

    @classmethod
    def draw(cls, seed: str, world_size: int) -> "Blow":
        """One that is decided by a seed."""
        random = Random(seed)
        kind = random.choice(_KINDS)
        most = {"work": 90, "beat": 150, "everyone": 60, "save": 70, "file": 300, "time": 4000}[
            kind
        ]
        return cls(random.randrange(world_size), kind, random.randint(1, most))


def rank(config: Config, *, worker: Worker) -> int:
    """Train as `hp train` does, and die in the middle as the plan has it."""
    plan = json.loads((worker.run_dir.parent / PLAN).read_text())
    log = worker.run_dir / KILLS
    attempt = len(log.read_text().splitlines()) if log.exists() else 0
    _Watched(worker, log, attempt, plan)
    return train.main(config, worker=worker)


class _Watched:
    """Counts heartbeats and calls of a rank, notes its first step, and ends it when it is time."""

    def __init__(self, worker: Worker, log: Path, attempt: int, plan: Mapping[str, Any]) -> None:
        self.worker, self.log, self.phase, self.has_trained = worker, log, "start", False
        self.append, self.kill = _appender(), os.kill
        self.count = 0
        blow = None
        if attempt < plan["kills"]:
            blow = Blow.draw(f"{plan['seed']} {attempt}", worker.info.world_size)
        self.blow = blow if blow and blow.victim == worker.info.rank else None
        self.beat = worker.heartbeats.beat
        worker.heartbeats.beat = self.on_beat  # type: ignore[method-assign]
        if self.blow and self.blow.kind == "time":
            threading.Timer(self.blow.number / 1000, self.die).start()
        if self.blow and self.blow.kind in ("save", "file"):
            for name in _TOUCHING:
                setattr(os, name, self.counted(getattr(os, name)))

    def on_beat(self, *, step: int, phase: str, waiting: bool = False) -> None:
        self.beat(step=step, phase=phase, waiting=waiting)
        if phase == "optimizer" and not self.has_trained:
            self.has_trained = True
            if self.worker.info.rank == 0:
                self.append(self.worker.run_dir / STEPS, f"{time.monotonic()}\n")
        self.phase = phase
        if self.blow is None or self.blow.kind not in ("work", "beat", "everyone"):
            return
        if self.blow.kind == "beat" or not phase.startswith("checkpoint"):
            self.hit()

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            in_thread = threading.current_thread().name.startswith(_SAVING)
            waits = self.has_trained and self.phase.startswith("checkpoint")
            in_save = in_thread or waits
            if self.blow and (self.blow.kind == "file" or in_save):
                self.hit()
            return call(*args, **kwargs)

        return wrapper

    def hit(self) -> None:
        self.count += 1
        assert self.blow is not None, "only a victim counts"
        if self.count == self.blow.number:
            self.die()

    def die(self) -> None:
        assert self.blow is not None, "only a victim dies"
        saving = [t.name for t in threading.enumerate() if t.name.startswith(_SAVING)]
        behind = " saving" if saving else ""
        place = (
            self.phase if self.phase.startswith("checkpoint") else self.phase.strip("0123456789")
        )
        self.append(self.log, f"{time.monotonic()} {self.blow.kind}{behind}|{place}\n")
        if self.blow.kind == "everyone":
            me = self.worker.info.rank
            kill_ranks([slot for slot in self.worker.heartbeats.slots() if slot.rank != me])
        self.kill(os.getpid(), signal.SIGKILL)


def _appender() -> Callable[[Path, str], None]:
    """Append a line with calls that nobody counts."""
    open_, write, close = os.open, os.write, os.close

    def append(path: Path, text: str) -> None:
        descriptor = open_(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        write(descriptor, text.encode())
        close(descriptor)

    return append


@dataclass(frozen=True)
class _End:
    """What must be the same in every repetition of a run."""

    steps: tuple[tuple[float, ...], ...]
    tensors: Mapping[str, SavedTensor]


def run(count: int, folder: Path, *, seed: int, data: Path) -> Outcome:
    """Kill ranks `count` times, in as many runs as that takes."""
    began = time.monotonic()
    failures: list[str] = []
    places: Counter[str] = Counter()
    recoveries: list[float] = []
    done = number = 0
    quiet: dict[str, _End] = {}
    while done < count:
        name = list(LAYOUTS)[number % len(LAYOUTS)]
        if name not in quiet:
            quiet[name] = _train(folder / f"quiet-{number}", name, data, seed="", kills=0)
        run_dir = folder / f"killed-{number}" / "run"
        what = f"run {number} ({name}), seed {seed}"
        try:
            wanted = min(_PER_RUN, count - done)
            end = _train(run_dir.parent, name, data, seed=f"{seed} {number}", kills=wanted)
            _compare(end, quiet[name])
        except (AssertionError, OSError, ValueError) as error:
            failures.append(f"{what}: {error}")
        kills = _lines(run_dir / KILLS)
        done += len(kills)
        places.update(place for _, place in kills)
        firsts = [float(line) for line in _text(run_dir / STEPS).splitlines()]
        recoveries += [
            min((t for t in firsts if t > at), default=at) - at for at, _ in kills if firsts
        ]
        number += 1
        if failures and not kills:
            break
    notes = [f"{number} runs; first new step after a kill: {_spread(recoveries)}"]
    notes += [f"{kind}: {times}" for kind, times in sorted(_summed(places).items())]
    return Outcome("kills", done, failures, time.monotonic() - began, notes)


def _train(folder: Path, name: str, data: Path, *, seed: str, kills: int) -> _End:
    """Train to the end, whoever dies meanwhile, and check what is left."""
    folder.mkdir()
    (folder / PLAN).write_text(json.dumps({"seed": seed, "kills": kills}))
    keys = dict(TINY) | dict(LAYOUTS[name])
    keys |= {"run.output_dir": str(folder), "run.name": "run", "data.paths": str(data)}
    with output_to(folder / "output.txt"):
        status = launcher.run(resolve("quickstart", list(keys.items()), env={}), _entry=ENTRY)
    assert status == 0, f"status {status}: {_text(folder / 'output.txt')[-300:]!r}"
    run_dir = folder / "run"
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert not [n for n in names if "tmp" in n or "bad" in n], f"left behind: {names}"
    newest = newest_checkpoint(run_dir / "checkpoints")
    verify_checkpoint(newest)
    keys_of_row = ("step", "loss", "balance_loss", "grad_norm", "lr", "tokens")
    rows = [row for _, row in read_metrics(Folder.open(run_dir))]
    steps = tuple(tuple(row[key] for key in keys_of_row) for row in rows)
    return _End(steps, open_checkpoint(newest).manifest.tensors)


def _compare(end: _End, quiet: _End) -> None:
    here, there = [row[0] for row in end.steps], [row[0] for row in quiet.steps]
    assert here == there, f"steps {here} must be {there}"
    different = [one for one, other in zip(end.steps, quiet.steps, strict=True) if one != other]
    assert not different, f"steps differ: {different[:2]}"
    others = [name for name, tensor in quiet.tensors.items() if end.tensors.get(name) != tensor]
    assert not others, f"tensors differ: {others[:3]}"
    assert end.tensors.keys() == quiet.tensors.keys()


def _lines(path: Path) -> list[tuple[float, str]]:
    parted = [line.split(" ", 1) for line in _text(path).splitlines()]
    return [(float(at), place) for at, place in parted]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _summed(places: Counter[str]) -> dict[str, str]:
    """Places by kind of blow."""
    kinds: dict[str, Counter[str]] = {}
    for place, times in places.items():
        kind, _, phase = place.partition("|")
        kinds.setdefault(kind, Counter())[phase] += times
    return {
        f"killed by {kind}": f"{sum(c.values())} ("
        + ", ".join(f"{phase or 'start'} {n}" for phase, n in c.most_common(8))
        + ")"
        for kind, c in kinds.items()
    }


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (longest)"
