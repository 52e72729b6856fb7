"""Memory as `hp plan` adds it up, beside what a dry run of the same layout finds, both in GiB.

Nothing runs on a GPU: `hp dry-run` is the real code of every kind of rank on a device that computes
nothing. Compared are tensors alive at the peak, of the rank that needs most; and with what the plan
adds for fragmentation, the fewest bytes with which torch's allocator would meet all requests.
`--only WORD` takes the layouts that have it in their names.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from hp_plan import MACHINES, Estimate, estimate
from hp_train.cli import main as hp
from hp_trainer.config.options import resolve

FSDP_8B: dict[str, object] = {
    "mesh.dp_shard": 8,
    "data.seq_len": 8192,
    "train.microbatch_size": 2,
    "train.global_batch_size": 16,
    "train.recompute": "attention",
}
PP_120B: dict[str, object] = {
    "mesh.pp": 4,
    "mesh.dp_shard": 16,
    "mesh.ep": 8,
    "pipeline.schedule": "1f1b",
    "pipeline.stages_per_rank": 1,
    "data.seq_len": 4096,
    "train.microbatch_size": 1,
    "train.global_batch_size": 128,
}
PP_8B: dict[str, object] = {
    "mesh.pp": 4,
    "mesh.dp_replicate": 2,
    "mesh.gather": "stage",
    "pipeline.schedule": "1f1b",
    "pipeline.stages_per_rank": 1,
    "data.seq_len": 4096,
    "train.microbatch_size": 1,
    "train.global_batch_size": 16,
}
LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "Llama-3.1-8B, FSDP 8 by stage": ("llama-3.1-8b", {**FSDP_8B, "mesh.gather": "stage"}),
    "Llama-3.1-8B, FSDP 8 by block": ("llama-3.1-8b", {**FSDP_8B, "mesh.gather": "block"}),
    "Llama-3.1-8B, FSDP 4, tp 2": (
        "llama-3.1-8b",
        {**FSDP_8B, "mesh.dp_shard": 4, "mesh.tp": 2, "train.recompute": "none"},
    ),
    "Llama-3.1-8B, pp 4, all kept": ("llama-3.1-8b", PP_8B),
    "Llama-3.1-8B, pp 4, all but one computed again": (
        "llama-3.1-8b",
        {**PP_8B, "pipeline.retention": "recompute"},
    ),
    "Llama-3.1-8B, pp 4, all but one offloaded": (
        "llama-3.1-8b",
        {**PP_8B, "pipeline.retention": "offload"},
    ),
    "Qwen3-30B-A3B, 8 GPUs, ep 8, all again": (
        "qwen3-30b-a3b",
        {
            "mesh.dp_shard": 8,
            "mesh.ep": 8,
            "mesh.gather": "block",
            "train.microbatch_size": 4,
            "train.global_batch_size": 32,
            "train.recompute": "full",
        },
    ),
    "gpt-oss-120b, 64 GPUs, pp 4, ep 8, by stage": (
        "gpt-oss-120b",
        {**PP_120B, "mesh.gather": "stage"},
    ),
    "gpt-oss-120b, 64 GPUs, pp 4, ep 8, by block": (
        "gpt-oss-120b",
        {**PP_120B, "mesh.gather": "block"},
    ),
}
H100 = MACHINES["h100"]
_WORDS = ["alpha", "beta", "gamma", "delta", "of", "the"]


def main() -> None:
    """Compare all layouts, or those that are asked for, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of layouts")
    only = parser.parse_args().only
    tensors = ("layout", "static", "activations", "buffers", "plan, tensors", "dry run", "ratio")
    columns = (*tensors, "plan, with fragmentation", "dry run, needed", "ratio")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory(prefix="bench-plan-memory-") as scratch:
        text = Path(scratch, "text.txt")
        text.write_text("\n".join(" ".join(_WORDS * 10) for _ in range(8000)))
        for name, (preset, keys) in LAYOUTS.items():
            if only in name:
                print(row(name, preset, keys, text), flush=True)


def row(name: str, preset: str, keys: dict[str, object], text: Path) -> str:
    """One layout, both ways."""
    config = resolve(preset, keys.items(), env={}).config
    assert config.model.vocab_size
    planned = estimate(config, H100, vocab_size=config.model.vocab_size)
    live, needed = dry_run(preset, keys, text)
    memory = planned.memory
    static = memory.parameters + memory.gradients + memory.optimizer
    total = tensors(planned)
    whole = total + memory.fragmentation
    parts = (static, memory.activations, memory.buffers)
    cells = [_gibibytes(*parts, total, live), f"{total / live:.2f}"]
    cells += [_gibibytes(whole, needed), f"{whole / needed:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


def _gibibytes(*sizes: int) -> str:
    return " | ".join(f"{size / 2**30:.1f}" for size in sizes)


def tensors(planned: Estimate) -> int:
    """Bytes of tensors, without what else takes memory."""
    kinds = planned.memory.kinds
    return sum(kinds[k] for k in ("parameters", "gradients", "optimizer", "activations", "buffers"))


def dry_run(preset: str, keys: dict[str, object], text: Path) -> tuple[int, int]:
    """Bytes alive at the peak of the rank that holds most, and the most that a rank needs."""
    given = [f"{key}={value}" for key, value in keys.items()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hp(["dry-run", preset, *given, "--data", str(text), "--documents", "1", "--json"])
    memories = [rank["memory"] for rank in json.loads(printed.getvalue())["ranks"]]
    return max(int(m["peak_live"]) for m in memories), max(int(m["least"]) for m in memories)


if __name__ == "__main__":
    main()
