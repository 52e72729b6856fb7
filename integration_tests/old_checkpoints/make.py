"""Makes the folders beside this file, each in a format as the packages of commit 41bc79d wrote it.

They are never made anew: what they are for is to be loaded by every later version. How they came
about, from the root of a checkout of that commit, `HERE` being this folder::

    PYTHONPATH=$(echo packages/*/src | tr ' ' ':') python HERE/make.py HERE

What is in them is :func:`values` of the same names, cut over two ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hp_platform.testing import run_distributed

EXTRA = {"step": 3, "text": "\u00e9\n", "rate": 1e-300}


def values(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a tensor, which follow from its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def train_tensors() -> dict[str, Tensor]:
    """Plain, sharded, without elements, and with a name that is no ASCII."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.rows": distribute_tensor(values("rows", 5, 3), mesh, [Shard(0)]),
        "model.columns": distribute_tensor(values("columns", 2, 7), mesh, [Shard(1)]),
        "model.\u00e9": values("e", 4, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(3),
        "empty": torch.empty(0, 2),
    }


class Experts(nn.Module):
    """Two of four experts, with tensors as this package and as transformers have them."""

    def __init__(self, first: int, num_local: int) -> None:
        super().__init__()
        self.num_experts, self.first_expert = 4, first
        for name, shape in {"gate_up_proj": (4, 4, 3), "down_proj": (4, 3, 2)}.items():
            whole = values(name, *shape)
            self.register_parameter(name, nn.Parameter(whole[first : first + num_local].clone()))


def vtp_parameters(rows: slice) -> dict[str, nn.Parameter]:
    """Of two layers: one whole, one cut along dim 1."""
    return {
        "layers.0.whole": nn.Parameter(values("whole", 3, 2)),
        "layers.0.cut": nn.Parameter(values("cut", 2, 5)[:, rows].clone()),
    }


def vtp_dim(name: str) -> int | None:
    """How tensors are cut."""
    return 1 if name.endswith("cut") else None


def trained(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer after three steps, whose numbers do not depend on how tensors are cut."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    return optimizer


def make(folder: Path) -> None:
    """What each of two ranks does."""
    from hp_expert import save_experts  # noqa: PLC0415
    from hp_train.checkpoint import save_checkpoint as save_run  # noqa: PLC0415
    from hp_vtp import PipelineLayout  # noqa: PLC0415
    from hp_vtp.checkpoint import (  # noqa: PLC0415
        optimizer_dim,
        optimizer_tensors,
        save_checkpoint,
    )

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    tensors = train_tensors()
    save_run(folder / "train", step=3, tensors=tensors, extra=EXTRA, group=group, keep=1)
    module = nn.ModuleDict({"experts": Experts(2 * rank, 2)})
    others = {"gate.weight": values("gate", 4, 3)}
    save_experts(module, folder / "expert", others=others, group=group)
    parameters = vtp_parameters(slice(0, 3) if rank == 0 else slice(3, 5))
    optimizer = trained(parameters)
    save_checkpoint(
        folder / "vtp",
        {**parameters, **optimizer_tensors(optimizer, parameters)},
        sharded_dim=optimizer_dim(vtp_dim),
        layout=PipelineLayout.straight([2]),
        group=group,
        extra=EXTRA,
    )


if __name__ == "__main__":
    run_distributed(make, Path(sys.argv[1]).absolute(), world_size=2)
