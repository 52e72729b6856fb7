"""TRL's SFT and DPO with packing and other options beside one process."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from integration_tests.jobs.search import llama
from integration_tests.jobs.search.cases import Job


@dataclass(frozen=True)
class Setting:
    """Options of a trainer of TRL.

    Attributes:
        kind: SFT or DPO.
        fsdp: Whether FSDP2 shards the model.
        accumulate: Microbatches of an update.
        packing: Strategy by which samples are packed; empty: they are not.
        free: Whether batches have no padding.
        completion: Whether completions alone count.
        loss: Type of the loss.
        checkpointed: Whether activations are computed again.
    """

    kind: str = "sft"
    fsdp: bool = False
    accumulate: int = 1
    packing: str = ""
    free: bool = False
    completion: bool = False
    loss: str = ""
    checkpointed: bool = False


def cases() -> Iterator[Job]:
    """Return SFT and DPO with each option, under DDP and FSDP2, with and without accumulation."""
    for fsdp in (False, True):
        for accumulate in (1, 2):
            sft = Setting("sft", fsdp, accumulate)
            for some in (
                {},
                {"packing": "bfd"},
                {"packing": "wrapped"},
                {"completion": True},
                {"completion": True, "packing": "bfd"},
                {"loss": "dft"},
                {"checkpointed": True},
            ):
                yield _job(replace(sft, **some))
            dpo = Setting("dpo", fsdp, accumulate)
            for loss in ("sigmoid", "ipo", "hinge", "robust", "sppo_hard", "apo_zero"):
                yield _job(replace(dpo, loss=loss))


def _job(setting: Setting) -> Job:
    usual = asdict(Setting(setting.kind))
    told = [f"{n} {v}" for n, v in asdict(setting).items() if v != usual[n]]
    same = {n: v for n, v in asdict(setting).items() if n not in ("fsdp", "accumulate")}
    group = "-".join(map(str, same.values()))
    name = f"{setting.kind} {', '.join(told) or 'as usual'}"
    return Job(name, partial(_train, setting, 2), partial(_train, setting, 1), group)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(llama.VOCABULARY - 2)}
    words |= {"<pad>": llama.VOCABULARY - 2, "<end>": llama.VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def _texts(setting: Setting) -> list[dict[str, str]]:
    rows = []
    for number in range(llama.SAMPLES * llama.STEPS * 3):
        words = [f"w{(7 * number + 3 * i) % 60}" for i in range(3 + number % 5)]
        more = [f"w{(5 * number + i) % 60}" for i in range(2 + number % 4)]
        if setting.kind == "dpo":
            other = [f"w{(11 * number + i) % 60}" for i in range(2 + number % 3)]
            found = {"prompt": words, "chosen": more, "rejected": other}
        elif setting.completion:
            found = {"prompt": words, "completion": more}
        else:
            found = {"text": [*words, *more]}
        rows.append({name: " ".join(text) + " " for name, text in found.items()})
    return rows


def _train(setting: Setting, ranks: int) -> None:
    llama.meet()
    disable_progress_bars()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    accumulate = setting.accumulate if ranks > 1 else 1
    sharded: dict[str, Any] = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": llama.SAMPLES // accumulate // ranks,
            "gradient_accumulation_steps": accumulate,
            "gradient_checkpointing": setting.checkpointed,
            "max_steps": llama.STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "max_length": llama.LENGTH,
            **(sharded if setting.fsdp and ranks > 1 else {}),
        }
        set_seed(1234)
        data = Dataset.from_list(_texts(setting))
        if setting.kind == "dpo":
            trainer = DPOTrainer(
                llama.model(),
                llama.model(),
                DPOConfig(**common, loss_type=setting.loss),
                train_dataset=data,
                processing_class=_tokenizer(),
            )
        else:
            packed = {"packing": True, "packing_strategy": setting.packing}
            some: dict[str, Any] = packed if setting.packing else {}
            if setting.loss:
                some["loss_type"] = setting.loss
            arguments = SFTConfig(**common, **some, padding_free=setting.free)
            trainer = SFTTrainer(
                llama.model(), arguments, train_dataset=data, processing_class=_tokenizer()
            )
        trainer.train()
