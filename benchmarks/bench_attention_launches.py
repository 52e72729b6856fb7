"""What a layer of attention asks of a GPU and of the host: by blocks, and in calls of segments.

A microbatch of two sequences in bf16, forward and backward of a layer that is not the first, on a
device that computes nothing (`hp_dry`): kernels and copies but for those between ranks,
what the host waits for, bytes of masks, the most memory beside what was there, and calls of Python
functions of hp-context and hp-train. "blocks" is what runs where the kernel of variable lengths is
not taken; what it has while it runs is counted for that kernel alone. Nothing here is a time. Over
ranks the figures are those of the one that launches most.

    python benchmarks/bench_attention_launches.py
    python benchmarks/bench_attention_launches.py --only ring
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    HeadTail,
    Mask,
    SequenceLayout,
    SlidingWindow,
)
from hp_context.kernels import varlen
from hp_dry import DeviceRecorder, DryDevice, run_ranks
from hp_dry.trace import Allocate, HostWait, Launch
from hp_trainer.model.attention import attend

BATCH, LOCAL, RANKS, LAYERS = 2, 8192, 4, 2
GQA, LATENT = (32, 8, 128, 128), (16, 16, 192, 128)  # heads, key/value heads, sizes of q and of v
CAUSAL, WINDOW = Causal(), SlidingWindow(1023)


@dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
        name: What it is.
        mask: Mask of the layer.
        packed: Whether each sequence has documents of its own.
        shape: Heads, key/value heads, sizes of q and of v.
        sinks: Whether there are sinks.
        mode: Degree, ring and layout of context parallelism; None: one process.
    """

    name: str
    mask: Mask
    packed: bool = False
    shape: tuple[int, int, int, int] = GQA
    sinks: bool = False
    mode: tuple[int | None, bool, SequenceLayout] | None = None


MODES: dict[str, tuple[int | None, bool, SequenceLayout]] = {
    "gather": (1, False, HeadTail()),
    "gather, contiguous": (1, False, Contiguous()),
    "ring": (1, True, HeadTail()),
    "heads": (None, False, Contiguous()),
    "hybrid 2": (2, False, HeadTail()),
    "hybrid 2, ring": (2, True, HeadTail()),
}

CASES = [
    Case("documents", CAUSAL, packed=True),
    Case("documents, sinks", CAUSAL, packed=True, sinks=True),
    Case("causal, sinks", CAUSAL, sinks=True),
    Case("window", WINDOW),
    Case("window, documents", WINDOW, packed=True),
    Case("latent", CAUSAL, shape=LATENT),
    Case("latent, documents", CAUSAL, packed=True, shape=LATENT),
    *(
        Case(f"{kind}: cp {RANKS}, {name}", mask, packed="documents" in kind, mode=mode)
        for kind, mask in (("causal", CAUSAL), ("documents", CAUSAL), ("window", WINDOW))
        for name, mode in MODES.items()
        if kind != "window" or name in ("gather", "ring")
    ),
]


def documents_of(seq_len: int) -> tuple[Documents, ...]:
    """Lengths between 64 and 4096, evenly by their logarithm, other ones for each sequence."""
    generator = random.Random(0)  # noqa: S311
    found = []
    for _ in range(BATCH):
        lengths: list[int] = []
        while (left := seq_len - sum(lengths)) > 0:
            lengths.append(min(left, int(64 * 64 ** generator.random())))
        found.append(Documents(tuple(lengths)))
    return tuple(found)


@contextmanager
def counting_calls(found: list[int]) -> Iterator[None]:
    """Count calls of functions of the packages."""

    def see(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("/hp_context/" in file or "/hp_train/" in file):
            found[0] += 1

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def layer(case: Case, device: DeviceRecorder) -> dict[str, int]:
    """Figures of the last of some layers, on a dry device."""
    heads, kv_heads, size, value_size = case.shape
    num_ranks = 1 if case.mode is None else RANKS
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    q, k, v = (
        torch.empty(BATCH, LOCAL, *each, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for each in shapes
    )
    grad = torch.empty(BATCH, LOCAL, heads * value_size, device="cuda", dtype=torch.bfloat16)
    limits = documents_of(LOCAL * num_ranks) if case.packed else None
    sinks = torch.zeros(heads) if case.sinks else None
    cores = [Attention(case.mask, sinks=sinks).to("cuda") for _ in range(LAYERS)]
    if case.mode is not None:
        degree, ring, layout = case.mode
        group = dist.group.WORLD
        assert group is not None
        parallel = ContextParallel(degree, ring=ring, layout=layout)
        for core in cores:
            parallel.apply(core, group)
    calls = [0]
    begin = 0
    for core in (*cores, cores[-1]):  # ranks compare masks and shapes in a first call
        q.grad = k.grad = v.grad = None
        device.storages.reset_peak()
        begin, held, calls[0] = len(device.trace.events), device.storages.live_bytes, 0
        with counting_calls(calls):
            attend(core, q, k, v, limits).backward(grad)
    events = device.trace.events[begin:]
    launches = [each for each in events if isinstance(each, Launch)]
    return {
        "launches": sum(each.num_kernels for each in launches),
        "attention": sum("attention" in each.what for each in launches),
        "waits": sum(isinstance(each, HostWait) for each in events),
        "masks": sum(map(mask_bytes, events)),
        "peak": device.storages.peak_bytes - held,
        "calls": calls[0],
    }


def mask_bytes(event: object) -> int:
    """Bytes of a mask, or of what is added to scores for it: all that is [queries, keys] here."""
    if not isinstance(event, Allocate) or len(event.shape) != 2:
        return 0
    return event.num_bytes if event.dtype in ("bool", "bfloat16") else 0


def of_rank(case: Case) -> dict[str, int]:
    """One rank of several."""
    from hp_dry.recording.recorder import active  # noqa: PLC0415
    from hp_platform import initialize, shutdown  # noqa: PLC0415

    initialize(device_type="cuda")
    found = layer(case, active())
    shutdown()
    return found


def figures(case: Case, *, segments: bool) -> dict[str, int]:
    """Figures of a case by blocks, or in calls of segments."""
    usual = varlen.DEVICES
    varlen.DEVICES = usual if segments else ()
    try:
        if case.mode is None:
            with DryDevice() as device:
                return layer(case, device)
        ran = run_ranks(of_rank, case, world_size=RANKS, timeout=300)
        most: dict[str, int] = max(ran.results.values(), key=lambda each: each["launches"])
        return most
    finally:
        varlen.DEVICES = usual


def shown(figure: str, value: int) -> str:
    """A figure in a table."""
    return f"{value / 2**20:,.0f}" if figure in ("masks", "peak") else f"{value:,}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    names = ("launches", "attention", "waits", "masks", "peak", "calls")
    print(f"{BATCH} sequences of {LOCAL:,} positions, {RANKS} ranks of as many with cp; bf16, H100")
    print("| blocks > segments | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for case in CASES:
        if arguments.only not in case.name:
            continue
        before, after = figures(case, segments=False), figures(case, segments=True)
        cells = [f"{shown(name, before[name])} > {shown(name, after[name])}" for name in names]
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)
    print("masks, peak: MiB")


if __name__ == "__main__":
    main()
