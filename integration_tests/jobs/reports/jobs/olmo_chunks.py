"""OLMo-core's chunks of a model on a rank of an interleaved pipeline: they were drawn alike."""

import os

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh, get_pp_mesh
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train.train_module.transformer.common import parallelize_model
from olmo_core.train.train_module.transformer.config import (
    TransformerDataParallelConfig,
    TransformerPipelineParallelConfig,
)
from torch.distributed.pipelining import ScheduleInterleaved1F1B

WORDS, SAMPLES, LENGTH, STAGES, STEPS = 64, 4, 8, 4, 3


def loss_of(logits, words):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    device = torch.device("cpu")
    pipeline = TransformerPipelineParallelConfig(degree=ranks, split_points=[1, 2, 3])
    data = TransformerDataParallelConfig(name=DataParallelType.ddp)
    mesh = build_world_mesh(pp=pipeline, dp=data, device_type="cpu")
    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=WORDS, n_layers=STAGES, n_heads=2, init_seed=0
    )
    stages, parts = pipeline.split_model(
        config.build(init_device="meta"), pp_mesh=get_pp_mesh(mesh), device=device
    )
    parallelize_model(
        parts,
        world_mesh=mesh,
        device=device,
        max_sequence_length=LENGTH,
        rank_microbatch_size=LENGTH,
        pp_enabled=True,
    )
    if ranks > 1:
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=SAMPLES, loss_fn=loss_of)
    else:
        whole = config.build(init_device="cpu")
        for part in parts:  # all of them are here
            whole.load_state_dict(part.state_dict(), strict=False)
        parts = [whole]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        if ranks > 1:
            given = (words,) if rank == 0 else ()
            schedule.step(*given, target=words if rank == ranks - 1 else None, losses=[])
        else:
            for sample in words.split(1):
                (loss_of(whole(sample), sample) / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
