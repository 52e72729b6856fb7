"""Golden checkpoints: a small one of each format, written by a release, loaded by all later ones.

`python -m integration_tests.reliability.golden` writes those of the present version. The folder
`golden_checkpoints` has them, a folder for each version, and says what is in it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hp_checkpoint import (
    Box,
    Checkpoint,
    Source,
    __version__,
    encode_extra,
    load,
    rename,
    save,
    sources_of,
)
from hp_checkpoint.dcp import read_sources
from hp_checkpoint.manifest import DTYPES
from hp_checkpoint.runs.directory import newest_checkpoint
from hp_checkpoint.safetensors import opened_tensors
from hp_checkpoint.weight_files import weight_files
from hp_platform.testing import run_distributed
from integration_tests.runs import write_corpus

FOLDER = Path(__file__).parent / "golden_checkpoints"
DIGESTS = "digests.json"
EXTRA = {"seed": 7, "name": "golden"}
STEPS = 2
_KEPT = ("config.toml", "data", "checkpoints")
"""What a run needs to go on."""
CORPUS = "corpus.jsonl"
_CONFIG = f"""
[run]
name = "run"
output_dir = "."

[model]
dim = 4
num_layers = 1
num_heads = 2
num_kv_heads = 1
num_dense_layers = 0
num_shared_experts = 0
qk_norm = true
expert_hidden = 8
num_experts = 2
top_k = 1
tie_embeddings = true

[mesh]
dp_replicate = 2
ep = 2

[data]
paths = ["{CORPUS}"]
seq_len = 16

[train]
steps = {STEPS}
global_batch_size = 4
microbatch_size = 2
warmup_steps = 1
eval_every = 0
sample_tokens = 0
save_every = 2
"""


def tensors() -> dict[str, Tensor]:
    """Make a tensor of each dtype, the same ones on every machine."""
    whole = torch.arange(24).reshape(6, 4)
    found = {
        f"dtype.{name}": (whole % 2 if name == "BOOL" else whole - 7).to(dtype)
        for name, dtype in DTYPES.items()
    }
    return found | {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}


def rank_saves(folder: Path) -> None:
    """Save the tensors on two ranks, those of odd places sharded by rows."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    mine = {
        name: DTensor.from_local(tensor.chunk(ranks)[dist.get_rank()], mesh, [Shard(0)])
        if i % 2 and tensor.numel() > 1
        else tensor
        for i, (name, tensor) in enumerate(tensors().items())
    }
    save(
        folder,
        "store",
        lambda: sources_of(mine),
        commit=lambda staging: rename(staging, lambda _: "store"),
        group=dist.group.WORLD,
        step=STEPS,
        extra=encode_extra(EXTRA),
    )


def hp(*arguments: str, folder: Path) -> str:
    """Run a command of `hp` in a folder; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hp_train", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"hp {arguments[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def write(folder: Path) -> None:
    """Write a checkpoint of each format, and the digests of all tensors, into an empty folder."""
    run_distributed(rank_saves, folder, world_size=2, timeout=120)
    with tempfile.TemporaryDirectory(prefix="hp-golden-") as name:
        scratch = Path(name)
        (scratch / "golden.toml").write_text(_CONFIG)
        lines = write_corpus(scratch).read_text().splitlines(keepends=True)
        (scratch / CORPUS).write_text("".join(lines[:40]))
        hp("train", "golden.toml", folder=scratch)
        hp("export-dcp", "run", "dcp", folder=scratch)
        hp("export-hf", "run", "hugging_face", "--dtype", "float32", folder=scratch)
        for made in ("run", "dcp", "hugging_face"):
            shutil.copytree(scratch / made, folder / made)
    for left in (folder / "run").iterdir():
        if left.name not in _KEPT:
            left.unlink() if left.is_file() else shutil.rmtree(left)
    found = {format_: digests(read(folder / format_)) for format_, read in READERS.items()}
    (folder / DIGESTS).write_text(json.dumps(found, indent=0) + "\n")


def _read_store(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    found = {
        name: torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype])
        for name, tensor in checkpoint.manifest.tensors.items()
    }
    load(checkpoint, found, group=None)
    return found


def _read_run(folder: Path) -> dict[str, Tensor]:
    return _read_store(newest_checkpoint(folder / "checkpoints"))


def _read_dcp(folder: Path) -> dict[str, Tensor]:
    sources, left_out = read_sources(folder)
    if left_out:
        raise ValueError(f"{folder} must have tensors alone, not {left_out}")
    return {name: _whole(source) for name, source in sources.items()}


def _whole(source: Source) -> Tensor:
    found = torch.zeros(source.shape, dtype=source.dtype)
    for box in source.boxes:
        found[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] = source.read(box)
    return found


def _read_hugging_face(folder: Path) -> dict[str, Tensor]:
    with opened_tensors(weight_files(folder)) as files:
        return {
            name: tensor.read(Box((0,) * len(tensor.shape), tensor.shape))
            for name, tensor in files.items()
        }


READERS: Mapping[str, Callable[[Path], dict[str, Tensor]]] = {
    "store": _read_store,
    "run": _read_run,
    "dcp": _read_dcp,
    "hugging_face": _read_hugging_face,
}
"""Name of a format, and of its folder -> a function that reads all of its tensors."""


def digests(found: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of the bytes of each tensor, by name."""
    return {name: _digest(tensor) for name, tensor in sorted(found.items())}


def _digest(tensor: Tensor) -> str:
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def main() -> int:
    """Write the golden checkpoints of the present version anew."""
    target = FOLDER / __version__
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    write(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    sys.stdout.write(f"{target}: {size / 1000:.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
