"""OLMoE of transformers with its own expert parallelism: transformers #48205 and #48687."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.distributed import DistributedConfig

VOCABULARY, SAMPLES, LENGTH, STEPS = 99, 4, 16, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", default="eager", help="experts_implementation")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    more = {}
    with tempfile.TemporaryDirectory() as folder:  # each rank's own, with the same weights
        OlmoeForCausalLM(config).save_pretrained(folder)  # in a group, rank 0 alone would write
        if ranks > 1:
            dist.init_process_group("gloo")
            more["distributed_config"] = DistributedConfig(
                tp_size=ranks, enable_expert_parallel=True
            )
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation=args.experts, **more
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=data)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
