"""Models of transformers on two ranks: hp-train beside transformers' own `DistributedConfig`.

The same small model in fp32, the same batches, AdamW. One process of plain transformers says what
gradients must be, and what a token costs without any layout; hp-train also clips and reports. They
take turns, and medians are printed. CPU seconds are those of both ranks.

    python benchmarks/bench_transformers_peers.py
    python benchmarks/bench_transformers_peers.py --rounds 1 --steps 4 --models llama
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

HERE = Path(__file__).parent
SEQUENCES, LENGTH = 8, 128
SECONDS = 300.0
"""Most that a job may take."""
KEYS: dict[str, Any] = {
    "train.dtype": "float32",
    "train.global_batch_size": SEQUENCES,
    "train.warmup_steps": 0,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "data.seq_len": LENGTH,
    "data.documents": "joined",
    "data.eval_fraction": 0.2,
}
"""Keys of hp-train, besides model and layout."""
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}
LAYOUTS = {"llama": ("fsdp 2", "tp 2"), "qwen3_moe": ("fsdp 2", "ep 2", "tp 2 x ep 2")}
PEERS = ("transformers", "hp-train")


def make(name: str, folder: Path, *, steps: int) -> None:
    """Write a model, text as tokens for hp-train, and the batches that all read."""
    import torch  # noqa: PLC0415 - of a child
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from hp_data import load_tokenizer  # noqa: PLC0415
    from hp_data.dataset import Dataset  # noqa: PLC0415
    from hp_data.preparation import prepare  # noqa: PLC0415

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON, **MODELS[name])
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    fraction = KEYS["data.eval_fraction"]
    text = [str(HERE.parent / "docs")]
    prepare(folder / "tokens", paths=text, tokenizer=load_tokenizer(""), eval_fraction=fraction)
    data = Dataset.open(folder / "tokens", "train", seq_len=LENGTH, seed=0, separate=False)
    firsts = range(0, steps * SEQUENCES, SEQUENCES)
    batches = [data.batch(range(first, first + SEQUENCES)) for first in firsts]
    # hp-train reads the first batch for gradients, and once more for the first step.
    torch.save([(b.tokens, b.targets) for b in [*batches[:1], *batches]], folder / "batches.pt")
    (folder / "keys.json").write_text(json.dumps({**KEYS, "train.steps": steps}))


def measured(peer: str, layout: str, folder: Path) -> dict[str, Any] | str:
    """Run a job: what it has found, or the line that says why it failed."""
    ranks = 1 if layout == "one process" else 2
    out = folder / f"{peer} {layout}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "transformers_peers.py"), peer, layout, str(folder)]
    meeting = (folder / f"meeting {uuid4().hex}").as_uri()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "HP_INIT_METHOD": meeting}
    with tempfile.TemporaryFile("w+") as stderr:
        running = [
            subprocess.Popen(  # noqa: S603 - our own
                command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=stderr
            )
            for rank in range(ranks)
        ]
        until = time.monotonic() + SECONDS
        while any(rank.poll() is None for rank in running) and time.monotonic() < until:
            if any(rank.poll() for rank in running):
                break  # the others would wait for it
            time.sleep(0.02)
        for rank in running:
            rank.kill()
            rank.wait()
        stderr.seek(0)
        lines = stderr.read().splitlines()
    if not out.exists():  # what ends badly afterwards has been measured
        errors = [line for line in lines if "Error: " in line]
        return errors[0].strip() if errors else "it failed"
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def rounds_of(name: str, options: argparse.Namespace) -> None:
    """Print the rows of a model."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        child = [sys.executable, __file__, "--make", name, "--folder", text]
        subprocess.run([*child, "--steps", str(options.steps)], check=True)  # noqa: S603
        cells = [("transformers", "one process")]
        cells += [(peer, layout) for layout in LAYOUTS[name] for peer in PEERS]
        found: dict[tuple[str, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
        failed: dict[tuple[str, str], str] = {}
        for _ in range(options.rounds):
            for cell in cells:
                result = failed.get(cell) or measured(*cell, folder)
                if isinstance(result, str):
                    failed[cell] = result
                else:
                    found[cell].append(result)
    alone = rate(found[cells[0]])
    for cell in cells:
        peer, layout = cell
        if cell in failed:
            print(f"{name:10} {layout:12} {peer:13} {failed[cell]}", flush=True)
            continue
        worst = max(found[cell], key=lambda one: one["error"])
        error = f"{worst['error']:9.1e}" if layout != "one process" else f"{'':9}"
        tokens = rate(found[cell])
        print(
            f"{name:10} {layout:12} {peer:13} {error} {tokens:8.0f} {tokens / alone:6.2f}",
            flush=True,
        )


def rate(found: list[dict[str, Any]]) -> float:
    """Median of tokens per CPU second."""
    middle: float = statistics.median(one["tokens_per_cpu_second"] for one in found)
    return middle


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of which the first two are warm-up")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--make", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.folder, steps=options.steps)
        return
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed")
        return
    print(f"{'model':10} {'layout':12} {'peer':13} {'gradient':>9} {'tokens/s':>8} {'of one':>6}")
    for name in options.models:
        rounds_of(name, options)


if __name__ == "__main__":
    main()
