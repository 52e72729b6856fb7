"""accelerate's loop and its options beside one process."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from torch.utils.data import DataLoader

from integration_tests.jobs.search import llama
from integration_tests.jobs.search.cases import Job


@dataclass(frozen=True)
class Setting:
    """How a loop is prepared.

    Attributes:
        wrapped: DDP or FSDP2.
        accumulate: Microbatches of an update.
        each_batch: Whether each microbatch is reduced.
        split: Whether a batch is split over ranks.
        dispatched: Whether rank 0 reads batches for all.
        reshard: FSDP2: `reshard_after_forward`.
        efficient: FSDP2: `cpu_ram_efficient_loading`.
        checkpointed: FSDP2: activations are computed again.
        size_based: FSDP2: modules are wrapped by size.
        tied: Whether the head has the table's matrix.
        scheduled: Whether a rate falls.
        buckets: DDP: options of buckets and graphs.
        clip: Largest norm; 0: any.
    """

    wrapped: str = "ddp"
    accumulate: int = 1
    each_batch: bool = False
    split: bool = False
    dispatched: bool = False
    reshard: bool = True
    efficient: bool = False
    checkpointed: bool = False
    size_based: bool = False
    tied: bool = False
    scheduled: bool = False
    buckets: str = ""
    clip: float = 1.0


def cases() -> Iterator[Job]:
    """Return DDP and FSDP2 with each option, and with pairs of some."""
    for wrapped in ("ddp", "fsdp2"):
        usual = Setting(wrapped)
        for accumulate in (1, 2):
            for some in (
                {},
                {"tied": True},
                {"split": True},
                {"dispatched": True},
                {"scheduled": True, "split": True},
                {"clip": 0.0},
                {"each_batch": True},
            ):
                yield _job(replace(usual, accumulate=accumulate, **some))
    for reshard in (True, False):
        for accumulate in (1, 2):
            for tied in (False, True):
                base = Setting("fsdp2", accumulate, reshard=reshard, tied=tied)
                yield _job(replace(base, checkpointed=True))
                yield _job(replace(base, size_based=True))
                yield _job(replace(base, efficient=True))
    for buckets in ("static", "unused", "views", "fp16"):
        for accumulate in (1, 2):
            yield _job(Setting("ddp", accumulate, buckets=buckets))


def _job(setting: Setting) -> Job:
    usual = asdict(Setting())
    told = [f"{n} {v}" for n, v in asdict(setting).items() if v != usual[n] and n != "wrapped"]
    group = f"{setting.tied}-{setting.scheduled}-{setting.clip}"
    return Job(
        f"{setting.wrapped} {', '.join(told) or 'as usual'}",
        partial(_train, setting, 2),
        partial(_train, setting, 1),
        group,
    )


def _plugin(setting: Setting) -> FullyShardedDataParallelPlugin:
    how: dict[str, Any] = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    if setting.size_based:
        how = {"min_num_params": 2000}
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap" if setting.size_based else "transformer_based_wrap",
        reshard_after_forward=setting.reshard,
        cpu_ram_efficient_loading=setting.efficient,
        activation_checkpointing=setting.checkpointed,
        **how,
    )


def _train(setting: Setting, ranks: int) -> None:
    llama.meet()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    many, handlers = ranks > 1, []
    options: dict[str, dict[str, Any]] = {
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
        "fp16": {"comm_hook": "fp16"},
    }
    if setting.buckets and many:
        handlers = [DistributedDataParallelKwargs(**options[setting.buckets])]
    accumulate = setting.accumulate if many else 1
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=_plugin(setting) if many and setting.wrapped == "fsdp2" else None,
        kwargs_handlers=handlers,
        dataloader_config=DataLoaderConfiguration(
            split_batches=setting.split and many,
            dispatch_batches=(setting.dispatched and many) or None,
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulate, sync_each_batch=setting.each_batch and many
        ),
    )
    model = llama.model(tied=setting.tied)
    each = llama.SAMPLES // accumulate
    batch = each if setting.split and many else each // ranks
    rows: Any = llama.samples(llama.SAMPLES * llama.STEPS)
    data: Any = DataLoader(rows, batch_size=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 5)
    if setting.scheduled:
        schedule = accelerator.prepare(schedule)
    for some in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(**some).loss)
            if accelerator.sync_gradients and setting.clip:
                accelerator.clip_grad_norm_(model.parameters(), setting.clip)
            optimizer.step()
            if setting.scheduled:
                schedule.step()
            optimizer.zero_grad()
