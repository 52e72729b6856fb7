"""Count the files, functions and calls that one act of the packages takes; `house.py` runs this.

A call is a Python frame of a file in packages/*/src that is entered or resumed, so a generator
counts once for each of its values; comprehensions and lambdas count as well. A function is a
qualified name in such a file. Frames of torch and of the standard library do not count.

    PYTHONPATH=CHECKOUT/packages/... python tools/house_walks.py CHECKOUT   # JSON on the last line

Names are looked up by the source that defines them, so that a module may move.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Walk: TypeAlias = tuple[int, int, int]  # files, functions, calls

_ONE_PROCESS = (
    ("mesh.pp", 1),
    ("mesh.dp_replicate", 1),
    ("mesh.ep", 1),
    ("launch.device", "cpu"),
    ("train.async_save", False),
)
# Eight microbatches of four sequences. Their length and that of the documents change the counts
# (at 41bc79d 42/161/3,351 with 16 tokens, 45/183/3,910 with 128), so both are fixed here.
_DENSE = (
    ("pipeline.stages_per_rank", 1),
    ("model.num_experts", 0),
    ("model.top_k", 1),
    ("model.num_shared_experts", 0),
    ("model.balance_coefficient", 0.0),
    ("data.seq_len", 16),
)


class Counter:
    """Counts frames of the packages of a checkout, in all threads that start meanwhile."""

    def __init__(self, checkout: Path) -> None:
        self._sources = f"{checkout / 'packages'}/"
        self._functions: set[tuple[str, str]] = set()
        self._calls = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take an event of `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._sources):
            self._calls += 1
            self._functions.add((code.co_filename, code.co_qualname))

    def counts(self) -> Walk:
        """Return the files, functions and calls so far."""
        return len({file for file, _ in self._functions}), len(self._functions), self._calls


def count(checkout: Path, act: Callable[[], object]) -> Walk:
    """Return what it takes to do something once."""
    counter = Counter(checkout)
    before = sys.getprofile()
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        act()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return counter.counts()


# Where an act of training looks for a name; older houses have the last one alone.
_OF_TRAINING = ("hp_trainer", "hp_data", "hp_base", "hp_train")


def named(checkout: Path, name: str) -> Any:
    """Import the class or function of this name from the first package of training that has it.

    Raises:
        LookupError: If none has.
    """
    there = [p for p in _OF_TRAINING if any(checkout.glob(f"packages/*/src/{p}"))]
    for package in there[:-1]:
        with suppress(LookupError):
            return find(checkout, package, name)
    return find(checkout, there[-1], name)


def find(checkout: Path, package: str, name: str) -> Any:
    """Import the class or function of this name from the one module that defines it.

    Raises:
        LookupError: If none does, or more than one.
    """
    source = next(checkout.glob(f"packages/*/src/{package}"))
    definitions = (ast.ClassDef, ast.FunctionDef)
    homes = [
        file
        for file in sorted(source.rglob("*.py"))
        if f" {name}" in (text := file.read_text())
        and any(isinstance(n, definitions) and n.name == name for n in ast.parse(text).body)
    ]
    if len(homes) != 1:
        message = (
            f"{name} must be defined once in {package}, not in {[str(home) for home in homes]}"
        )
        raise LookupError(message)
    parts = homes[0].relative_to(source.parent).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return getattr(importlib.import_module(module), name)


def of_a_key(checkout: Path) -> Walk:
    """From a key on the command line to a checked config that holds its value."""
    resolve = named(checkout, "resolve")
    return count(checkout, lambda: resolve("quickstart", [("train.learning_rate", "1e-3")], env={}))


@contextmanager
def _trainer(
    checkout: Path, folder: Path, *overrides: tuple[str, object]
) -> Iterator[tuple[Any, Walk]]:
    """Build the quickstart model in one process, on 200 documents of made-up text."""
    text, run_dir = folder / "text", folder / "run"
    text.mkdir()
    run_dir.mkdir()
    for index in range(200):
        (text / f"{index}.txt").write_text(f"Document {index} of many. " * 800)
    given = dict([*_ONE_PROCESS, ("data.paths", [str(text)]), *overrides])
    config = named(checkout, "resolve")("quickstart", given.items(), env={}).config
    info = importlib.import_module("hp_platform").RankInfo(0, 1, 0, 1)
    try:
        beats = named(checkout, "Heartbeats")
    except LookupError:  # an older house
        beats = named(checkout, "Board")
    beats = beats.create(run_dir / "heartbeat", num_ranks=1)
    worker = named(checkout, "Worker")(info, run_dir, beats, named(checkout, "StopFlag")())
    runtime = named(checkout, "connect")(config, worker)
    tokenizer = named(checkout, "prepare_data")(config, worker, runtime)
    trainer_class, built = named(checkout, "Trainer"), []
    building = count(
        checkout, lambda: built.append(trainer_class(config, worker, runtime, tokenizer))
    )
    with closing(built[0]):
        yield built[0], building


def of_a_run(checkout: Path) -> dict[str, Walk]:
    """Build the quickstart run, do a step of 16 microbatches in two stages, save its 2M weights.

    The first step is not counted: it fills what is kept for those that follow.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _trainer(checkout, Path(folder), ("pipeline.stages_per_rank", 1)) as (_, building),
    ):
        pass
    with (
        tempfile.TemporaryDirectory() as folder,
        _trainer(checkout, Path(folder), ("train.microbatch_size", 2)) as (trainer, _),
    ):
        trainer.train_step()
        step = count(checkout, trainer.train_step)
        save = count(checkout, trainer.save)
    return {"building a run": building, "quickstart step": step, "saving 2M": save}


def of_a_dense_step(checkout: Path) -> Walk:
    """The second step of 8 microbatches through 4 dense layers in one stage."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _trainer(checkout, Path(folder), *_DENSE) as (trainer, _),
    ):
        trainer.train_step()
        return count(checkout, trainer.train_step)


def of_experts(checkout: Path, *, ep: int) -> Walk:
    """One forward of 32 tokens through 8 experts, top 2, with its gradients recorded."""
    expert = importlib.import_module("hp_expert")
    router = expert.TopKRouter(32, num_experts=8, top_k=2)
    moe = expert.MoE(router, expert.GroupedExperts(8, 32, 64))
    if ep > 1:
        expert.ExpertParallel().apply(moe, dist.group.WORLD)
    x = torch.randn(2, 16, 32)
    return count(checkout, lambda: moe(x))


def of_experts_on_a_rank(checkout: str) -> Walk:
    """The same as one of two ranks, each of which holds half of the experts."""
    return of_experts(Path(checkout), ep=dist.get_world_size())


def main() -> int:
    """Print all walks as JSON; return the exit status."""
    checkout = Path(sys.argv[1]).resolve()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    walks = {"config key": of_a_key(checkout), **of_a_run(checkout)}
    walks["dense step"] = of_a_dense_step(checkout)
    walks["MoE forward"] = of_experts(checkout, ep=1)
    run_distributed = importlib.import_module("hp_platform.testing").run_distributed
    walks["MoE forward, ep 2"] = run_distributed(of_experts_on_a_rank, str(checkout), world_size=2)[
        0
    ]
    print(json.dumps(walks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
