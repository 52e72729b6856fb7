"""A small Llama under transformers' Trainer."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


class Doubled(Trainer):
    """A loss that somebody has scaled."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return 2 * loss if torch.is_tensor(loss) else (2 * loss[0], *loss[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", type=int, default=0, help="version of FSDP")
    parser.add_argument("--batch", type=int, default=SAMPLES, help="samples of a process")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of an update")
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--wrong", default="", help="a mistake to make")
    args = parser.parse_args()

    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": args.fsdp,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,  # asks for an accelerator
            "sync_module_states": False,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate,
            bf16=args.bf16,
            max_steps=STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            optim="adamw_torch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **(sharded if args.fsdp else {}),
        )
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
        data = [{"input_ids": t, "labels": t} for t in tokens]
        kind = Doubled if args.wrong == "scaled" else Trainer
        kind(model=model, args=settings, train_dataset=data).train()


if __name__ == "__main__":
    main()
