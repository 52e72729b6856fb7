"""What a loss that holds a tile of the logits at once costs: CPU time, memory, beside all logits.

Forward and backward of the output matrix and the cross-entropy, in fp32, as the last stage of
hp-train computes them, in turn: `hp_trainer.model.linear_cross_entropy`, and a matrix product with
`torch.nn.functional.cross_entropy`. CPU seconds are those of the process. Memory is what the
operators of both allocate, less the gradient of the output matrix, counted without computing.

    python benchmarks/bench_loss.py
    python benchmarks/bench_loss.py --rounds 1 --tokens 256
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_platform.testing import LiveBytes
from hp_trainer.model import linear_cross_entropy

VOCABULARY = 151_936  # of Qwen3
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of [T, D], as torch has it."""
    logits = F.linear(x, weight.to(x.dtype)).float()
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


LOSSES: dict[str, Loss] = {"in tiles": linear_cross_entropy, "all logits": all_logits}


def inputs(tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, output matrix in fp32 and targets."""
    x = torch.randn(tokens, dim).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, dim) * 0.02).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (tokens,))


def cpu_seconds(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of a forward and a backward."""
    for tensor in given[:2]:
        tensor.grad = None
    began = time.process_time()
    loss(*given).backward()
    return time.process_time() - began


def mib(loss: Loss, tokens: int, dim: int) -> float:
    """What a loss holds at most in bf16 beside the gradient of the output matrix."""
    with FakeTensorMode():
        given = inputs(tokens, dim, torch.bfloat16)
        with LiveBytes() as memory:
            loss(*given).backward()
        assert given[1].grad is not None
        return float(memory.peak - given[1].grad.nbytes) / 2**20


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dim", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = inputs(arguments.tokens, arguments.dim, torch.float32)
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for _ in range(arguments.rounds):
        for name, loss in LOSSES.items():
            seconds[name].append(cpu_seconds(loss, given))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"{arguments.tokens} tokens, width {arguments.dim}, vocabulary {VOCABULARY:,}, fp32")
    for name, found in medians.items():
        print(f"{name:12} {found:6.2f} CPU s")
    print(f"ratio        {medians['in tiles'] / medians['all logits']:6.2f}")
    print(f"\n8,192 tokens, vocabulary {VOCABULARY:,}, bf16: MiB beside the gradient of the matrix")
    for dim in (2048, 4096):
        print(
            f"width {dim}: " + ", ".join(f"{n} {mib(f, 8192, dim):,.0f}" for n, f in LOSSES.items())
        )


if __name__ == "__main__":
    main()
