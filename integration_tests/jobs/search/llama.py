"""What the jobs of libraries have in common: a tiny Llama and its batches."""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


def meet() -> None:
    """Make a process group of one where there is none, for libraries that ask for one."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def model(*, tied: bool = False, dropout: float = 0.0) -> LlamaForCausalLM:
    """Return a Llama of two layers, the same on every rank."""
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def samples(count: int, *, padded: bool = False) -> list[dict[str, Tensor]]:
    """Return samples; padded ones are of several lengths, whose padding no loss counts."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, VOCABULARY, (count, LENGTH), generator=generator)
    found = []
    for number, row in enumerate(tokens):
        labels, mask = row.clone(), torch.ones_like(row)
        if padded:
            cut = LENGTH - number % 5 * 2
            row[cut:], mask[cut:], labels[cut:] = 0, 0, -100
        found.append({"input_ids": row, "labels": labels, "attention_mask": mask})
    return found
