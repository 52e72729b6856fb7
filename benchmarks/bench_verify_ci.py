"""Time `hp-verify --ci` of a mixture of experts of transformers, with and without a kept reference.

A tiny random Qwen3-MoE, trained by AdamW as transformers itself spreads it over two ranks: FSDP2
with experts over both (`DistributedConfig(fsdp_size=2, ep_size=2)`), on Gloo, beside one process.
The first check runs the reference and keeps it, the second takes it from there, the third has a
loss that is twice what it should be, and looks again at where it differs.

    python benchmarks/bench_verify_ci.py
    python benchmarks/bench_verify_ci.py --type mixtral --layers 4
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

BATCH, TOKENS, STEPS, VOCABULARY = 4, 32, 3, 128


def make(folder: Path, kind: str, layers: int) -> None:
    """Save a random model."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train(folder: str, ranks: int, scale: float) -> None:
    """Train a saved model on one process, or on all ranks that torchrun has started."""
    more = {}
    if ranks > 1:
        dist.init_process_group("gloo")
        more["distributed_config"] = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
        if ranks > 1:
            tokens = tokens.chunk(ranks)[dist.get_rank()]
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        (scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


def check(folder: Path, scale: float) -> tuple[float, int, str]:
    """Check a job; return the seconds, the exit status and the output."""
    job = [__file__, "--model", str(folder / "model")]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    began = time.monotonic()
    done = subprocess.run(  # noqa: S603 - this file
        [
            *(sys.executable, "-m", "hp_verify", "--ci", "--cache", str(folder / "cache")),
            *("--", sys.executable, *launch, *job, "--ranks", "2", "--scale", str(scale)),
            *("--against", "--", sys.executable, *job),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1200,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return time.monotonic() - began, done.returncode, done.stdout


def main() -> None:
    """Print seconds and what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--type", default="qwen3_moe", help="type of a model of transformers")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print all output")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        train(options.model, options.ranks, options.scale)
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make(folder / "model", options.type, options.layers)
        for what, scale in (("first", 1.0), ("reference kept", 1.0), ("loss doubled", 2.0)):
            seconds, status, output = check(folder, scale)
            lines = output.strip().splitlines()[0 if options.verbose else -3 :]
            told = "".join(f"\n  {line}" for line in lines)
            print(f"{options.type}, {what}: {seconds:.1f} s, status {status}{told}", flush=True)


if __name__ == "__main__":
    main()
