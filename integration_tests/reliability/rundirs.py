"""Run directories of strangers: one line each, and nothing outside of them is touched.

A program of its own, since it forks for every case: it has imported torch and started nothing.

    python -m integration_tests.reliability.rundirs COUNT SEED
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401 - imported once, for every case

import hp_trainer.launch.external
import hp_trainer.training.train  # noqa: F401 - likewise
from hp_checkpoint.manifest import digest_line
from hp_trainer.config.schema import fields
from integration_tests.reliability import strangers
from integration_tests.reliability.kills import TINY
from integration_tests.reliability.outcome import Outcome
from integration_tests.runs import write_corpus

_STEPS = 4
_KEYS = (
    *("train.steps=4", "train.save_every=2", "train.keep_checkpoints=3", "train.eval_every=0"),
    *("mesh.pp=1", "mesh.dp_replicate=1", "mesh.ep=1", "pipeline.stages_per_rank=1"),
    *("train.async_save=false", "launch.device=cpu", "launch.threads_per_process=1"),
)
_FILES = ("config.toml", "metrics.jsonl", ".lock", "heartbeat", "loss.svg", "timeline.json")
_INNER = ("errors/rank-0.stack.txt", "tensorboard/events", "data/index.json", "data/train.bin")
_FOLDERS = ("errors", "data", "checkpoints", "tensorboard")
_FOREIGN = (2, 4, 9)


def _one_rank() -> dict[str, str]:
    """Variables by which torchrun would start a single rank: it trains in the process itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found = {name: str(value) for name, value in names.items()}
    return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@dataclass(frozen=True)
class _Mutant:
    """How a good run directory becomes a bad one.

    Attributes:
        what: In words.
        mutate: Changes a copy; the second argument is a folder of somebody's files.
        refusals: Statuses that are right.
        accepted: See `strangers.Case`.
        names: Likewise.
        by_launcher: Whether the launcher meets it, which must then answer before it starts ranks.
    """

    what: str
    mutate: Callable[[Path, Path], None]
    refusals: Sequence[int] = _FOREIGN
    accepted: str | None = None
    names: str = ""
    by_launcher: bool = False


def run(count: int, *, seed: int) -> Outcome:
    """Run the program of this module."""
    return strangers.run_program(__name__, "run directories", count, seed=seed)


def mutants(random: Random) -> Iterator[_Mutant]:
    """All there are, in an order in which the first few are of every kind."""
    families = [
        _kinds(),
        _hard_links(),
        _configs(random),
        _metrics(random),
        _extras(),
        _manifests(),
        _harmless(),
    ]
    while families:
        for family in list(families):
            mutant = next(family, None)
            if mutant is None:
                families.remove(family)
            else:
                yield mutant


def _kinds() -> Iterator[_Mutant]:
    """Something else in place of a file or a folder: links, pipes, sockets, devices, folders."""
    for how, put in _KINDS.items():
        for number, name in enumerate((*_FILES, *_FOLDERS, *_INNER)):
            if how == "folder" and name in _FOLDERS:
                continue

            def mutate(
                run_dir: Path,
                theirs: Path,
                name: str = name,
                put: Callable[[Path, Path], object] = put,
            ) -> None:
                path = run_dir / name
                path.parent.mkdir(exist_ok=True)
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
                put(path, theirs)

            by_launcher = "/" not in name or bool(number % 2)
            file = name.rpartition("/")[2]
            yield _Mutant(f"{how} in place of {name}", mutate, names=file, by_launcher=by_launcher)


def _bind(path: Path, _theirs: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


_KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, theirs: path.symlink_to(theirs / "secret"),
    "link to a folder": lambda path, theirs: path.symlink_to(theirs / "folder"),
    "link to nothing": lambda path, theirs: path.symlink_to(theirs / "nothing"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _bind,
    "folder": lambda path, _: path.mkdir(),
}


def _hard_links() -> Iterator[_Mutant]:
    """Another name for somebody's file: it may be read, and is never written to."""
    for name in (*_FILES, "errors/rank-0.txt", "errors/rank-0.stack.txt"):

        def mutate(run_dir: Path, theirs: Path, name: str = name) -> None:
            path = run_dir / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            os.link(theirs / "secret", path)

        is_read = name in ("config.toml", "metrics.jsonl")
        accepted = None if is_read else "resumed from"
        yield _Mutant(f"hard link in place of {name}", mutate, accepted=accepted)


def _configs(random: Random) -> Iterator[_Mutant]:
    """Lines of config.toml with values that their keys do not take, and files that are no TOML."""
    wrong = {int: ("-1", '"x"', "1.5", "true"), float: ("nan", '"x"', "[]"), bool: ("2", '"x"')}
    keys = [key for key, field in fields().items() if field.base in wrong]
    for key in random.sample(keys, 22):
        value = random.choice(wrong[fields()[key].base])

        def mutate(run_dir: Path, _: Path, key: str = key, value: str = value) -> None:
            section, name = key.split(".")
            path = run_dir / "config.toml"
            before, after = path.read_text().split(f"\n[{section}]\n")
            lines = after.splitlines()
            number = next(n for n, line in enumerate(lines) if line.startswith(f"{name} ="))
            lines[number] = f"{name} = {value}"
            path.write_text(f"{before}\n[{section}]\n" + "\n".join(lines))

        yield _Mutant(f"{key} = {value}", mutate, refusals=(2,), names=key, by_launcher=True)
    contents = {
        "no TOML": b"[train\nsteps = ",
        "bytes of no text": b"[train]\nsteps = 4 # \xff\xfe\n",
        "zeros": bytes(5000),
        "nothing but depth": b"a = " + b"[" * 50_000,
        "16 MiB": b"# " + b"x" * (16 << 20),
        "an unknown section": b"[trian]\nsteps = 4\n",
        "an unknown key": b"[train]\nstepz = 4\n",
        "a section that is none": b"train = 3\n",
    }
    for what, content in contents.items():
        yield _Mutant(
            f"config.toml: {what}",
            lambda run_dir, _, content=content: (run_dir / "config.toml").write_bytes(content),  # type: ignore[misc]
            names="config.toml",
            by_launcher=True,
        )


def _metrics(random: Random) -> Iterator[_Mutant]:
    """A line of metrics.jsonl that no run writes."""
    values: dict[str, tuple[object, ...]] = {
        "step": (-1, 0, 1.5, True, "2", None, [2], 1 << 60),
        "loss": ("2.5", None, [], True, {}),
        "tokens": (1.5, "7", False),
        "lr": ("0.1", [0.1]),
        "skipped": (1, ["a"]),
    }
    for key, wrongs in values.items():
        for value in wrongs:
            yield _line(f"{key} = {value!r}", _edited(key, value))
    lines = {
        "no JSON": b'{"step": 1, "loss": \n',
        "empty": b"\n",
        "a list": b"[1, 2]\n",
        "NaN": b'{"step": 1, "loss": NaN}\n',
        "too large a number": b'{"step": 1, "loss": 1e999}\n',
        "no step": b'{"loss": 1.0}\n',
        "no loss": b'{"step": 1}\n',
        "bytes of no text": b'{"step": 1, "loss": 1.0, "skipped": "\xff\xfe"}\n',
        "depth": b"[" * 50_000 + b"\n",
        "length": b'{"step": 1, "loss": 1.0, "x": "' + b"y" * (1 << 17) + b'"}\n',
        "a step again": b"",
    }
    for what, line in lines.items():
        yield _line(what, lambda before, line=line: line or before * 2)  # type: ignore[misc]

    def sparse(run_dir: Path, _: Path) -> None:
        os.truncate(run_dir / "metrics.jsonl", 1 << 40)

    # What follows the step that is gone on from is cut off, and need not be read for that.
    yield _Mutant("metrics.jsonl of a terabyte", sparse, accepted="resumed from")
    for number in range(8):
        noise = random.randbytes(40 + number).replace(b"\n", b"?") + b"\n"
        yield _line(f"noise {number}", lambda _, noise=noise: noise)  # type: ignore[misc]


def _edited(key: str, value: object) -> Callable[[bytes], bytes]:
    return lambda line: json.dumps(json.loads(line) | {key: value}).encode() + b"\n"


def _line(what: str, edit: Callable[[bytes], bytes]) -> _Mutant:
    def mutate(run_dir: Path, _: Path) -> None:
        path = run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines[1] = edit(lines[1])
        path.write_bytes(b"".join(lines))

    return _Mutant(f"metrics.jsonl:2: {what}", mutate, refusals=(9,), names="metrics.jsonl:")


def _extras() -> Iterator[_Mutant]:
    """Positions that no run reaches, in a checkpoint whose hashes are made to fit."""
    wrongs: tuple[object, ...] = (-1, -(1 << 62), 1 << 60, 1.5, "4", True, None, [], {"a": 1})
    for key in ("step", "next_sequence", "skipped", "skipped_in_a_row"):
        for value in wrongs:
            yield _extra(f"{key} = {value!r}", _set(key, value))
    for key in ("step", "next_sequence", "data"):
        yield _extra(f"without {key}", lambda extra, key=key: extra.pop(key))  # type: ignore[misc]
    for value in (1, True, ["a"]):
        yield _extra(f"data = {value!r}", _set("data", value))
    yield _extra("another step", _set("step", _STEPS - 1))
    yield _extra("more steps skipped than done", _set("skipped", _STEPS + 1))
    yield _extra("more skipped in a row than at all", _set("skipped_in_a_row", 1))
    yield _extra("more read than any batch has", _set("next_sequence", _STEPS << 32))


def _set(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda extra: extra.update({key: value})


def _extra(what: str, edit: Callable[[dict[str, Any]], object]) -> _Mutant:
    def mutate(run_dir: Path, _: Path) -> None:
        _resign(run_dir, lambda manifest: edit(manifest["extra"]))

    return _Mutant(f"extra: {what}", mutate, refusals=(4,), names="extra:")


def _resign(run_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    folder = run_dir / "checkpoints" / f"step-{_STEPS:08d}"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    edit(manifest)
    text = msgspec.json.encode(manifest)
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_bytes(digest_line(text))


def _manifests() -> Iterator[_Mutant]:
    """Manifests with hashes that fit; the checkpoint before is taken, and that is said."""
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "step": lambda m: m.update(step=_STEPS + 1),
        "negative step": lambda m: m.update(step=-1),
        "version": lambda m: m.update(version=2),
        "no tensors": lambda m: m.pop("tensors"),
        "a file elsewhere": lambda m: m["files"][0].update(name="../../config.toml"),
        "a longer file": lambda m: m["files"][0].update(bytes=1 << 40),
        "extra is a list": lambda m: m.update(extra=[1]),
        "extra is text": lambda m: m.update(extra="4"),
    }
    for what, edit in edits.items():
        yield _Mutant(
            f"manifest: {what}",
            lambda run_dir, _, edit=edit: _resign(run_dir, edit),  # type: ignore[misc]
            accepted="skipped damaged checkpoint",
        )


def _harmless() -> Iterator[_Mutant]:
    """What runs that were killed leave behind, and what nobody reads."""
    contents = {
        "heartbeat": (b"", b"\xff" * 77, bytes(192)),
        ".lock": (b"kept", b"\0" * 9),
        "loss.svg": (b"<svg",),
        "notes.txt": (b"mine",),
        "errors/rank-0.txt": (b"\xff\xfe",),
    }
    for name, texts in contents.items():
        for text in texts:

            def mutate(run_dir: Path, _: Path, name: str = name, text: bytes = text) -> None:
                (run_dir / name).parent.mkdir(exist_ok=True)
                (run_dir / name).write_bytes(text)

            yield _Mutant(f"{name} holds {text[:9]!r}", mutate, accepted="resumed from")

    def cut_off(run_dir: Path, _: Path) -> None:
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 5, "lo')

    yield _Mutant("metrics.jsonl is cut off", cut_off, accepted="resumed from")


def _case(mutant: _Mutant, good: Path, seed: int) -> strangers.Case:
    def make(room: Path, theirs: Path) -> list[str]:
        shutil.copytree(good, room / "run", symlinks=True)
        mutant.mutate(room / "run", theirs)
        return ["train", "--resume", str(room / "run"), f"train.steps={_STEPS + 1}"]

    return strangers.Case(
        f"{mutant.what}, seed {seed}",
        make,
        refusals=mutant.refusals,
        accepted=mutant.accepted,
        names=mutant.names,
        env={} if mutant.by_launcher else _one_rank(),
    )


def _good_run(folder: Path) -> Path:
    """Train a small model, in the way in which every case goes on."""
    data = write_corpus(folder)
    keys = [f"{key}={value}" for key, value in TINY.items()]
    own = [key.partition("=")[0] for key in _KEYS]
    keys = [key for key in keys if key.partition("=")[0] not in own]
    paths = [f"data.paths={data}", f"run.output_dir={folder}", "run.name=run"]
    answer = strangers.ask(["train", *keys, *_KEYS, *paths], folder, env=_one_rank())
    assert answer.status == 0, answer
    return folder / "run"


def _main() -> int:
    count, seed = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as good, tempfile.TemporaryDirectory() as folder:
        run_dir = _good_run(Path(good))
        found = [_case(mutant, run_dir, seed) for mutant in mutants(Random(seed))][:count]
        failures, notes = strangers.meet_all(found, Path(folder))
    strangers.tell(len(found), failures, notes)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
