"""Tensors that are written and read again, and whether they are the same bits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.w": torch.randn(16, 6, generator=generator),
        "model.half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "model.scalar": torch.tensor(3),
        "model.none": torch.empty(0, 4),
    }
    tensors |= {
        f"optimizer.{moment}.{name.removeprefix('model.')}": tensor * 2
        for moment in ("exp_avg", "exp_avg_sq")
        for name, tensor in list(tensors.items())
    }
    return tensors | {"model.f8": torch.arange(4.0).to(torch.float8_e4m3fn)}


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor).fill_(1) for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.detach().contiguous().reshape(-1).view(torch.uint8)

    return one.keys() == other.keys() and all(
        torch.equal(bits(one[name]), bits(other[name])) for name in one
    )
