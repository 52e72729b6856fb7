"""A step of Muon over 4 Gloo ranks (FSDP2's shards): owners, against gathering on every rank.

`owners` is `hp_optim.Muon`. `gather` gathers each direction on every rank in bfloat16 and
orthogonalises it there, `torch` is `torch.optim.Muon` on the same DTensors as they are. Bytes that
a rank sends and flops of its products are counted, seconds are CPU seconds of all ranks together;
the ways alternate, and the median is printed. Messages inside of operators of DTensors, as
`torch` has them, are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from hp_optim import Muon, NewtonSchulz, orthogonalize
from hp_optim.newton_schulz import rate_factor
from hp_platform.testing import record_exchanges, run_distributed

WORLD_SIZE = 4
WIDTH, HIDDEN, LAYERS = 128, 384, 4
SHAPES = [
    *[(WIDTH, WIDTH)] * 4,
    *[(HIDDEN, WIDTH)] * 2,
    (WIDTH, HIDDEN),
]
REPEATS = 3
RATE, MOMENTUM = 0.02, 0.95


class Row(NamedTuple):
    """What a rank sends, computes and takes in a step."""

    sent: int
    flops: int
    seconds: float


def parameters(seed: int) -> list[nn.Parameter]:
    """Return matrices of a model, cut by rows, with gradients."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    found = []
    for shape in SHAPES * LAYERS:
        parameter = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        found.append(parameter)
    return found


class Gathering:
    """Muon that gathers every direction on every rank."""

    def __init__(self, those: Sequence[nn.Parameter]) -> None:
        self.parameters = those
        self.momenta = [torch.zeros_like(p) for p in those]

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters."""
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            gradient, tensor = parameter.grad, parameter.data
            if not isinstance(gradient, DTensor) or not isinstance(tensor, DTensor):
                raise TypeError("parameters must be DTensors")
            momentum.lerp_(gradient, 1 - MOMENTUM)
            direction = gathered(gradient.lerp(momentum, MOMENTUM).bfloat16())
            whole = orthogonalize(direction, NewtonSchulz())
            mesh, rank = tensor.device_mesh, dist.get_rank()
            mine = DTensor.from_local(
                whole.chunk(WORLD_SIZE)[rank], mesh, tensor.placements, run_check=False
            )
            tensor.mul_(1 - RATE * 0.1)
            tensor.add_(mine, alpha=-RATE * rate_factor(None, (whole.shape[0], whole.shape[1])))


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Steps = Callable[[], object]
WAYS: dict[str, Callable[[list[nn.Parameter]], Steps]] = {
    "owners": lambda those: Muon(those, lr=RATE, bucket_bytes=1 << 17).step,
    "gather": lambda those: Gathering(those).step,
    "torch": lambda those: torch.optim.Muon(those, lr=RATE).step,
}


def measure() -> dict[str, Row]:
    """Return what this rank does in a step of each way, after checking that all agree."""
    cut = {name: parameters(0) for name in WAYS}
    steps = {name: make(cut[name]) for name, make in WAYS.items()}
    counted: dict[str, tuple[int, int]] = {}
    for name, step in steps.items():
        with record_exchanges() as exchanges, FlopCounterMode(display=False) as flops:
            step()
        counted[name] = sum(each.num_bytes for each in exchanges), flops.get_total_flops()
    for one, other in zip(cut["owners"], cut["gather"], strict=True):
        torch.testing.assert_close(one.data, other.data, rtol=0, atol=RATE * 2**-5)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(REPEATS):
        for name, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return {name: Row(*counted[name], statistics.median(seconds[name])) for name in WAYS}


def main() -> None:
    """Print a row for each way: the most that a rank sends and computes, and all ranks' seconds."""
    ranks = run_distributed(measure, world_size=WORLD_SIZE, timeout=600)
    print(f"{'way':8} {'MiB sent':>9} {'GFLOP':>7} {'least':>7} {'CPU s':>7}")
    for name in WAYS:
        rows = [rank[name] for rank in ranks]
        sent, most = max(row.sent for row in rows), max(row.flops for row in rows)
        least, seconds = min(row.flops for row in rows), sum(row.seconds for row in rows)
        mib = f"{sent / 2**20:.2f}" if sent else "-"
        print(f"{name:8} {mib:>9} {most / 1e9:7.2f} {least / 1e9:7.2f} {seconds:7.2f}")


if __name__ == "__main__":
    main()
