"""A small Llama in accelerate's loop."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, default=0, help="version of FSDP")
    parser.add_argument("--original", action="store_true", help="FSDP1: use_orig_params")
    parser.add_argument("--batch", type=int, default=SAMPLES, help="samples of a process")
    parser.add_argument("--wrong", default="", help="a mistake to make")
    args = parser.parse_args()

    plugin = None
    if args.fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=args.fsdp,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            use_orig_params=args.original if args.fsdp == 1 else None,
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    set_seed(1234)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (SAMPLES * STEPS, LENGTH), generator=generator)
    data = DataLoader([{"input_ids": t, "labels": t} for t in tokens], batch_size=args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    for batch in data:
        loss = model(**batch).loss
        if args.wrong == "scaled":
            loss = loss * accelerator.num_processes
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
