"""transformers' Trainer and its options beside one process."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer, TrainingArguments, set_seed

from integration_tests.jobs.search import llama
from integration_tests.jobs.search.cases import Job


@dataclass(frozen=True)
class Setting:
    """Options of a Trainer.

    Attributes:
        fsdp: Whether FSDP2 shards the model.
        accumulate: Microbatches of an update.
        tied: Whether the head has the table's matrix.
        padded: Whether samples are of several lengths.
        smoothing: Label smoothing.
        optimizer: Name of the optimizer.
        schedule: Schedule of the rate.
        checkpointed: Whether activations are computed again.
        clip: Largest norm.
        averaged: Whether tokens are averaged over ranks.
    """

    fsdp: bool = False
    accumulate: int = 1
    tied: bool = False
    padded: bool = False
    smoothing: float = 0.0
    optimizer: str = "adamw_torch"
    schedule: str = "constant"
    checkpointed: bool = False
    clip: float = 1.0
    averaged: bool = True


def cases() -> Iterator[Job]:
    """Return DDP and FSDP2 with each option, with and without accumulation."""
    for fsdp in (False, True):
        for accumulate in (1, 2):
            usual = Setting(fsdp, accumulate)
            for some in (
                {},
                {"tied": True},
                {"padded": True},
                {"smoothing": 0.1},
                {"smoothing": 0.1, "padded": True},
                {"schedule": "cosine"},
                {"schedule": "linear"},
                {"checkpointed": True},
                {"checkpointed": True, "tied": True},
                {"clip": 0.1},
                {"clip": 0.0},
                {"optimizer": "sgd"},
                {"optimizer": "adamw_torch_fused"},
                {"optimizer": "adagrad"},
                {"optimizer": "adafactor"},
                {"optimizer": "rmsprop"},
                {"averaged": False},
            ):
                yield _job(replace(usual, **some))


def _job(setting: Setting) -> Job:
    usual = asdict(Setting())
    told = [f"{n} {v}" for n, v in asdict(setting).items() if v != usual[n] and n != "fsdp"]
    same = {n: v for n, v in asdict(setting).items() if n not in ("fsdp", "accumulate")}
    group = "-".join(map(str, same.values()))
    name = f"{'fsdp2' if setting.fsdp else 'ddp'} {', '.join(told) or 'as usual'}"
    return Job(name, partial(_train, setting, 2), partial(_train, setting, 1), group)


def _train(setting: Setting, ranks: int) -> None:
    llama.meet()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    accumulate = setting.accumulate if ranks > 1 else 1
    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=llama.SAMPLES // accumulate // ranks,
            gradient_accumulation_steps=accumulate,
            gradient_checkpointing=setting.checkpointed,
            label_smoothing_factor=setting.smoothing,
            average_tokens_across_devices=setting.averaged,
            max_grad_norm=setting.clip,
            max_steps=llama.STEPS,
            learning_rate=1e-2,
            lr_scheduler_type=setting.schedule,
            weight_decay=0.1,
            optim=setting.optimizer,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **(sharded if setting.fsdp and ranks > 1 else {}),
        )
        set_seed(1234)
        model = llama.model(tied=setting.tied)
        data = llama.samples(llama.SAMPLES * llama.STEPS, padded=setting.padded)
        Trainer(model=model, args=settings, train_dataset=data).train()
