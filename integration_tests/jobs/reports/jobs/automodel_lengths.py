"""Automodel's pipeline whose batches change their length within a step: Automodel #3530."""

import os

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SAMPLES, LENGTHS, STEPS = 64, 4, (16, 12), 3


def loss_of(logits, tokens):
    logits = getattr(logits, "logits", logits)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    parts = [model]
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
        pipeline = AutoPipeline(mesh, pp_batch_size=SAMPLES, device=torch.device("cpu"))
        pipeline.build(
            model,
            loss_fn=loss_of,
            parallelize_fn=lambda part, **given: fully_shard(part, mesh=given["world_mesh"]["dp"]),
        )
        parts = pipeline.parts
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        for length in LENGTHS:
            tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=data)
            if ranks > 1:
                pipeline.update_seq_len(length)
                is_last = rank == ranks - 1
                pipeline.step(tokens, target=tokens if is_last else None, losses=[])
            else:
                for sample in tokens.split(1):
                    loss_of(model(sample), sample).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
