"""Experts of one's own beside Megatron-FSDP, of both versions: Megatron-LM #5956 and #6660."""

import argparse
import os

import torch
import torch.distributed as dist
from megatron_fsdp_on_cpu import pretend
from torch.distributed.device_mesh import init_device_mesh
from torch_experts import LENGTH, SAMPLES, STEPS, WORDS, Experts, Model

pretend()

import megatron_fsdp
from megatron_fsdp.experimental import Flat, fully_shard, fully_shard_optimizer
from megatron_fsdp.experimental.placement import Placements


def of_version_1(model, ranks):
    model[0].experts.weight.allreduce = False  # in Megatron's words: of the experts' own groups
    return megatron_fsdp.fully_shard_model(
        model,
        device_mesh=init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("fsdp", "tp")),
        expt_device_mesh=init_device_mesh(
            "cpu", (ranks, 1, 1), mesh_dim_names=("ep", "fsdp", "tp")
        ),
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[Experts],
        device=torch.device("cpu"),
        calculate_per_token_loss=True,
    )


def of_version_2(model, ranks):
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("fsdp", "ep"))
    flat = [Flat()]
    fully_shard(model.experts, mesh["fsdp"], Placements(["fsdp"], flat, flat, flat))
    fully_shard(model, mesh["fsdp", "ep"]._flatten("dp"), Placements(["dp"], flat, flat, flat))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=2, help="of Megatron-FSDP")
    parser.add_argument("--microbatches", type=int, default=1)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Model()
    parts = args.microbatches
    if ranks > 1:
        dist.init_process_group("gloo")
        weight, model.experts.group = model.experts.weight, dist.group.WORLD
        model.experts.weight = torch.nn.Parameter(weight.data.chunk(ranks)[rank].clone())
    if args.version == 1:
        model = torch.nn.Sequential(model)  # it takes a name for an expert's by its ".experts."
    is_first = ranks > 1 and args.version == 1
    if is_first:
        model = of_version_1(model, ranks)
        parts *= ranks  # its gradients are sums over ranks
    elif ranks > 1:
        of_version_2(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    if ranks > 1 and not is_first:
        fully_shard_optimizer(optimizer)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        batch = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)[rank::ranks]
        for words in batch.chunk(args.microbatches):
            loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            model.install_optimized_model_weights()
            model.zero_grad_buffer()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
