"""FSDP2 in bfloat16 over a part that only later microbatches reach: Automodel #3540."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

DIM, SAMPLES, STEPS = 16, 4, 3


class Tower(nn.Module):
    """A model with a part for images, of which not every microbatch has some."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.images, self.out = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x, *, has_images):
        hidden = self.words(x)
        return self.out(torch.tanh(hidden + self.images(x) if has_images else hidden))


def in_bfloat16(model, x, *, has_images):
    """Call a model as FSDP2 does with such a policy, in one process."""
    narrow = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    return functional_call(model, narrow, x.bfloat16(), {"has_images": has_images})


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Tower()
    if ranks > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        for microbatch in range(2):
            x = torch.randn(SAMPLES, DIM, generator=data)[rank::ranks]
            if ranks > 1:
                model.set_requires_gradient_sync(microbatch == 1)
                output = model(x, has_images=microbatch == 1)
            else:
                output = in_bfloat16(model, x, has_images=microbatch == 1)
            output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
