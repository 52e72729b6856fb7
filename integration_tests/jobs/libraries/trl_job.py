"""A small Llama under TRL's trainers: supervised, packed, and with preferences."""

import argparse
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


def tokenizer():
    words = {f"w{i}": i for i in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<end>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def rows(is_dpo):
    """Samples of several lengths, with a better and a worse answer where these are asked for."""
    for number in range(3 * SAMPLES * STEPS):
        asked = [f"w{(7 * number + 3 * i) % 60}" for i in range(3 + number % 5)]
        answers = [
            [f"w{(step * number + i) % 60}" for i in range(2 + number % size)]
            for step, size in ((5, 4), (11, 3))
        ]
        asked, better, worse = (" ".join(words) + " " for words in (asked, *answers))
        if is_dpo:
            yield {"prompt": asked, "chosen": better, "rejected": worse}
        else:
            yield {"text": asked + better}


def llama():
    set_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
    )
    return LlamaForCausalLM(config)


def doubled(kind):
    """A trainer whose loss somebody has scaled."""

    class Doubled(kind):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 2 * loss

    return Doubled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dpo", action="store_true", help="preferences")
    parser.add_argument("--packed", action="store_true", help="samples end to end in a row")
    parser.add_argument("--fsdp", type=int, default=0, help="version of FSDP")
    parser.add_argument("--batch", type=int, default=SAMPLES, help="rows of a process")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of an update")
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
        settings = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": args.batch,
            "gradient_accumulation_steps": args.accumulate,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.1,
            "optim": "adamw_torch",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "max_length": LENGTH,
            **(sharded if args.fsdp else {}),
        }
        kind = DPOTrainer if args.dpo else SFTTrainer
        kind = doubled(kind) if args.wrong == "scaled" else kind
        data = Dataset.from_list(list(rows(args.dpo)))
        if args.dpo:
            more, arguments = {"ref_model": llama()}, DPOConfig(**settings)
        else:
            packing = {"packing": True, "packing_strategy": "bfd"} if args.packed else {}
            more, arguments = {}, SFTConfig(**settings, **packing)
        kind(
            llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), **more
        ).train()


if __name__ == "__main__":
    main()
