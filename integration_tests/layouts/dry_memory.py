"""Memory of real runs on the CPU, by torch's own profiler, and of dry runs of the same program.

What can be compared is what both do alike: fp32, and no experts over one rank alone, for which CUDA
has kernels that keep less than the CPU's. Gloo lets go of what it was given a moment after it said
that it was done, which only ever adds: so real ranks rest a moment after each wait, and the
smallest of their steps is what the program itself needs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from hp_data import load_tokenizer
from hp_dry import active_device, run_ranks
from hp_dry.rehearsal import run_classes
from hp_dry.report.summary import summarize
from hp_plan.costs.routing import parse_skew
from hp_platform import RankInfo, doing, initialize
from hp_platform.testing import run_distributed
from hp_train.dry_run.command import dry_config
from hp_train.dry_run.rehearsal import Job, run_rank
from hp_trainer.config import Config
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, prepare_run, worker_of

_REST = 0.003
_TIMEOUT = 300.0
_STEPS = 4 if os.environ.get("HP_WHOLE") else 2

_GPIPE = {"schedule": "gpipe", "stages_per_rank": 1}
_1F1B = {"schedule": "1f1b", "stages_per_rank": 1}
_INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}
_DENSE = {
    "dim": 256,
    "dense_hidden": 1024,
    "num_kv_heads": 4,
    "num_experts": 0,
    "top_k": 1,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "dropout": 0.0,
}
# Every token visits every expert, so that real routing is even.
_EXPERTS = _DENSE | {"expert_hidden": 384, "num_experts": 4, "top_k": 4}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp_replicate 2": {"mesh": {"dp_replicate": 2}},
    "dp_shard 2": {"mesh": {"dp_shard": 2}},
    "dp_replicate 2 x dp_shard 2": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2, 1f1b": {"mesh": {"pp": 2}, "pipeline": _1F1B},
    "pp 2, interleaved": {"mesh": {"pp": 2}, "pipeline": _INTERLEAVED},
    "pp 2 x dp_shard 2": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": _1F1B},
    "one rank, full recompute": {"train": {"recompute": "full"}},
    "dp_shard 2, full recompute": {"mesh": {"dp_shard": 2}, "train": {"recompute": "full"}},
    "ep 2": {"mesh": {"dp_replicate": 2, "ep": 2}, "model": _EXPERTS},
}


def layout_config(name: str) -> Config:
    """One of `LAYOUTS`."""
    layout = LAYOUTS[name]
    train = {"global_batch_size": 8, "microbatch_size": 2} | layout.get("train", {})
    mesh = {"gather": "stage"} | layout.get("mesh", {})  # as on a CPU; a dry run would choose
    return config_of(
        {"mesh": mesh, "pipeline": layout.get("pipeline", _GPIPE)},
        model=layout.get("model", _DENSE),
        train=train,
        data={"seq_len": 128, "documents": "joined"},
    )


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.norms[1](x))))
        return torch.add(x, y)


class LanguageModel(nn.Module):
    """A plain transformer, which knows nothing of hp-*."""

    def __init__(self, *, dim: int = 256, vocab: int = 2000, again: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(4))
        self.norm, self.again = nn.LayerNorm(dim), again

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


PLAIN: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "fused AdamW": ({}, partial(torch.optim.AdamW, fused=True)),
    "foreach AdamW": ({}, partial(torch.optim.AdamW, foreach=True)),
    "SGD with momentum": ({}, partial(torch.optim.SGD, momentum=0.9)),
    "checkpointed": ({"again": True}, partial(torch.optim.AdamW, fused=True)),
    "a large vocabulary": ({"vocab": 20_000}, partial(torch.optim.AdamW, fused=True)),
}
FSDP: dict[str, tuple[dict[str, Any], bool]] = {
    "FSDP2": ({}, True),
    "FSDP2, kept after forward": ({}, False),
    "FSDP2, checkpointed": ({"again": True}, True),
    "FSDP2, a large vocabulary": ({"vocab": 20_000}, True),
}


def train_plain(name: str, device: str) -> None:
    """Train one of `PLAIN` for some steps."""
    sizes, optimizer = PLAIN[name]
    with torch.device(device):
        model = LanguageModel(**sizes)
    _train(model, optimizer(model.parameters(), lr=1e-3), device, steps=2)


def sharded(name: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One of `FSDP` over all ranks."""
    sizes, reshards = FSDP[name]
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device(device):
        model = LanguageModel(**sizes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train_sharded(name: str, device: str) -> None:
    """Train one of `FSDP` for some steps."""
    _train(*sharded(name, device), device, steps=_STEPS)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """One update of the weights."""
    tokens = torch.zeros(4, 256, dtype=torch.int64, device=device)
    F.cross_entropy(model(tokens), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, *, steps: int) -> None:
    for number in range(steps):
        with record_function(f"step {number}"), doing(f"step {number}"):
            step_of(model, optimizer, device)


def real_peaks(function: Callable[[], None]) -> list[int]:
    """Most bytes that were alive in each `record_function("step ...")` of a function."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, _resting():
        function()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    )
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
    )
    return [_most(changes, begin, end) for begin, end in steps]


def _most(changes: list[tuple[float, int]], begin: float, end: float) -> int:
    live = most = 0
    for at, num_bytes in changes:
        live += num_bytes
        if begin <= at <= end:
            most = max(most, live)
    return most


@contextmanager
def _resting() -> Iterator[None]:
    """Rest after each wait for Gloo, until its thread has let go of its tensors."""
    plain: Any = dist.Work.wait

    def wait(self: dist.Work, *args: Any) -> Any:
        done = plain(self, *args)
        time.sleep(_REST)
        return done

    work: Any = dist.Work
    work.wait = wait
    try:
        yield
    finally:
        work.wait = plain


def real_fsdp(name: str, num_ranks: int) -> int:
    """Bytes that a real rank needs on the CPU."""
    found = run_distributed(_real_fsdp, name, world_size=num_ranks, timeout=_TIMEOUT)
    return min(min(peaks[1:]) for peaks in found)


def _real_fsdp(name: str) -> list[int]:
    return real_peaks(partial(train_sharded, name, "cpu"))


def dry_fsdp(name: str, num_ranks: int) -> int:
    """Bytes that the first rank needs in a dry run."""
    run = run_ranks(_dry_fsdp, name, world_size=num_ranks, timeout=_TIMEOUT)
    peak: int = run.results[0]
    return peak


def _dry_fsdp(name: str) -> int:
    dist.init_process_group("nccl")
    train_sharded(name, "cuda")
    return active_device().storages.peak_bytes


def tracked_fsdp(name: str, num_ranks: int) -> int:
    """Bytes that torch's FSDPMemTracker finds in the second step of the first rank."""
    return run_distributed(_tracked, name, world_size=num_ranks, timeout=_TIMEOUT)[0]


def _tracked(name: str) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # noqa: PLC0415

    model, optimizer = sharded(name, "cpu")
    step_of(model, optimizer, "cpu")
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        step_of(model, optimizer, "cpu")
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak


def real_layout(name: str) -> list[int]:
    """Bytes that each real rank of one of `LAYOUTS` needs on the CPU."""
    config = layout_config(name)
    with tempfile.TemporaryDirectory() as folder:
        address = prepare_run(config, Path(folder))
        run = partial(_real_layout, msgspec.json.encode(config), folder, address)
        found = run_distributed(run, world_size=config.world_size, timeout=_TIMEOUT)
    return [min(peaks) for peaks in found]


def _real_layout(encoded: bytes, folder: str, address: str) -> list[int]:
    return real_peaks(partial(_train_layout, encoded, folder, address))


def _train_layout(encoded: bytes, folder: str, address: str) -> None:
    config, info = msgspec.json.decode(encoded, type=Config), RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address, backend="gloo")
    trainer = Trainer(config, worker_of(info, Path(folder)), runtime, load_tokenizer(""))
    for number in range(_STEPS):
        with record_function(f"step {number}"):
            trainer.train_step()
    trainer.close()


def dry_layout(name: str) -> list[int]:
    """Bytes that each rank of one of `LAYOUTS` needs in a dry run."""
    config = layout_config(name)
    with tempfile.TemporaryDirectory() as folder:
        prepare_run(config, Path(folder))
        skew = parse_skew("uniform", config.model)
        job = Job(config=dry_config(config), skew=skew, data=Path(folder) / "data", steps=2)
        classes = {rank: (rank,) for rank in range(config.world_size)}
        run = run_classes(run_rank, job, classes=classes, gpus_per_node=8)
    return [summarize(run.traces[rank]).memory.peak_live for rank in classes]
