"""What `hp-verify -- JOB` costs a job: CPU time of a step and memory, recorded and not.

A decoder in plain torch, trained by AdamW with clipping in one process and one thread: by itself,
recorded as a reference, recorded as a job beside that, and recorded as in the second run, which
keeps tensors around one module. Each is a process of its own; they take turns. CPU seconds are
those of a step after the first two; memory is the largest resident set of the process.

    python benchmarks/bench_verify_jobs.py
    python benchmarks/bench_verify_jobs.py --rounds 1 --tokens 256 --dim 256
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_verify.recording.events import SUFFIX
from hp_verify.recording.request import Focus, Request, environment

STEPS, SKIPPED = 6, 2
WAYS = ("alone", "reference", "job", "second run")
HEAD, VOCABULARY = 64, 4096


class Block(nn.Module):
    """Causal attention and SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.gate, self.up = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, length, dim]` to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def job(tokens: int, dim: int, layers: int) -> None:
    """Train, and print CPU seconds of a step and MiB."""
    torch.set_num_threads(1)
    blocks = [Block(dim) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, dim), *blocks, nn.Linear(dim, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(STEPS):
        batch = torch.randint(VOCABULARY, (4, tokens // 4 + 1))
        began = time.process_time()
        logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(statistics.median(seconds[SKIPPED:]), mib)


def measured(how: str, shape: list[str], kept: Path) -> tuple[float, float]:
    """CPU seconds of a step and MiB of a job's process.

    Args:
        how: One of `WAYS`.
        shape: Flags of this file.
        kept: Folder of the reference, which comes before its job.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = str(kept) if how == "reference" else own
        focus = Focus(3, "forward", "2", modules=("2",)) if how == "second run" else None
        reference = str(kept) if how == "job" else ""
        opened = how == "reference"  # as where it is kept
        request = Request(folder, reference=reference, steps=STEPS, focus=focus, opened=opened)
        env = dict(os.environ) if how == "alone" else environment(request)
        done = subprocess.run(  # noqa: S603 - this file
            [sys.executable, __file__, "--job", *shape],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=1800,
        )
        if how != "alone" and not list(Path(folder).glob(f"*{SUFFIX}")):
            raise RuntimeError("nothing was recorded")
    seconds, mib = done.stdout.split()
    return float(seconds), float(mib)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.tokens, options.dim, options.layers)
        return
    shape = ["--tokens", str(options.tokens), "--dim", str(options.dim)]
    shape += ["--layers", str(options.layers)]
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as kept:
            for how in WAYS:
                found.setdefault(how, []).append(measured(how, shape, Path(kept)))
    print(f"{options.layers} blocks of width {options.dim}, {options.tokens} tokens, fp32")
    alone = [statistics.median(values) for values in zip(*found["alone"], strict=True)]
    for how, values in found.items():
        seconds, mib = (statistics.median(some) for some in zip(*values, strict=True))
        print(
            f"{how:10} {seconds:7.3f} CPU s ({seconds / alone[0]:.2f}), "
            f"{mib:7.0f} MiB ({mib / alone[1]:.3f})"
        )


if __name__ == "__main__":
    main()
