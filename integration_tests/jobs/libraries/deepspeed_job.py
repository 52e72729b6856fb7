"""A small Llama under DeepSpeed's ZeRO."""

import argparse
import os

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--in-turn", action="store_true", help="part gradients in turn")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--wrong", default="", help="a mistake to make")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    settings = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_scatter": True,
            "round_robin_gradients": args.in_turn,
        },
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    decay = 0.1 if args.wrong == "decay" else 0.0
    groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": decay}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        for sample in batch[rank::ranks]:
            loss = engine(input_ids=sample[None], labels=sample[None]).loss
            engine.backward(loss)
            engine.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
