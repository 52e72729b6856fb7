"""Experts of one's own in Megatron's optimizer, whose norm clips: #5916, #6470, #6099."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "libraries"))

import torch
import torch.distributed as dist
from megatron_on_cpu import pretend

pretend()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import nn

WORDS, DIM, EXPERTS, SAMPLES, LENGTH, STEPS = 32, 16, 4, 4, 8, 3


class Experts(nn.Module):
    """Experts whose tokens all ranks of tensor parallelism have: a rank has some of them."""

    def __init__(self, parts, part):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        experts, share = [nn.Linear(DIM, DIM) for _ in range(EXPERTS)], EXPERTS // parts
        self.experts = nn.ModuleList(experts[part * share :][:share])
        for parameter in self.experts.parameters():
            parameter.allreduce = parts == 1  # in Megatron's words: of the experts' own groups
        self.parts, self.part = parts, part

    def forward(self, x):
        shares = copy_to_tensor_model_parallel_region(self.router(x).softmax(-1))
        shares = shares.chunk(self.parts, -1)[self.part].unbind(-1)
        x = copy_to_tensor_model_parallel_region(x)
        parts = zip(shares, self.experts, strict=True)
        outs = [share[..., None] * expert(x) for share, expert in parts]
        return reduce_from_tensor_model_parallel_region(sum(outs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adam")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=DIM,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=1,
        sequence_parallel=ranks > 1,
    )
    model = nn.Sequential(nn.Embedding(WORDS, DIM), Experts(ranks, rank), nn.Linear(DIM, WORDS))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer=args.optimizer,
        use_layer_wise_distributed_optimizer=args.optimizer == "muon",
        lr=1e-2,
        adam_eps=1e-3,
        clip_grad=0.1,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        model.finish_grad_sync()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
