"""torchtitan's export of a model with a tied head, read again: torchtitan #3764."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.models import qwen3

WORDS, SAMPLES, LENGTH, STEPS = 2048, 4, 8, 3


def built():
    """Return torchtitan's small Qwen3, of two layers, and its configuration."""
    if hasattr(qwen3, "qwen3_args"):  # torchtitan 0.2
        config = replace(qwen3.qwen3_args["debugmodel"], n_layers=2)
        model = qwen3.Qwen3Model(config)
        model.init_weights()
    else:
        config = qwen3.qwen3_configs["debugmodel_non_fused_qkv"]("sdpa")
        config = replace(config, layers=config.layers[:2])
        model = config.build()
        model.init_states()
    return model, config


def read_again(model, config, folder) -> None:
    """Export a model as one of Hugging Face's in two files, as its first checkpoint was; read it.

    That checkpoint's index names the head, which it has in its second file.
    """
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    adapter = qwen3.Qwen3StateDictAdapter(config, None)
    names = dict.fromkeys(adapter.to_hf(model.state_dict()), first)
    index = {"weight_map": {**names, "lm_head.weight": second}}
    rank = dist.get_rank()
    if rank == 0:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    adapter = qwen3.Qwen3StateDictAdapter(config, str(folder))
    state = adapter.to_hf(model.state_dict())
    where = adapter.fqn_to_index_mapping
    writer = HuggingFaceStorageWriter(
        path=str(folder / "sharded"),
        save_distributed=True,
        fqn_to_index_mapping=where,
        enable_consolidation=False,
    )
    dcp.save(state, storage_writer=writer)
    consolidate_safetensors_files_on_every_rank(
        str(folder / "sharded"), str(folder), where, num_threads=1
    )
    dist.barrier()
    read = {}
    for file in sorted(folder.glob("*.safetensors")):
        read |= load_file(file)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, adapter.from_hf(read), options=options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exported", action="store_true", help="and read again, after step 2")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model, config = built()
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=data)[rank::ranks]
        torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.exported and step == 1:
            folder = [TemporaryDirectory().name]  # one for all ranks
            dist.broadcast_object_list(folder)
            Path(folder[0]).mkdir(exist_ok=True)
            read_again(model, config, Path(folder[0]))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
