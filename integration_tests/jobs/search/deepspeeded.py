"""DeepSpeed's ZeRO and its options beside one process."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from transformers import LlamaForCausalLM

from integration_tests.jobs.search import llama
from integration_tests.jobs.search.cases import Case, Errors, Job
from integration_tests.jobs.search.tensors import error_of


@dataclass(frozen=True)
class Setting:
    """Options of an engine.

    Attributes:
        stage: Stage of ZeRO.
        accumulate: Microbatches of an update.
        overlap: Whether reductions overlap with the backward.
        contiguous: Whether gradients are copied into one buffer.
        bucket: Elements of a bucket.
        robin: Whether gradients are parted in turn.
        scatter: Whether gradients are scattered as they are reduced.
        persistent: Stage 3: elements up to which a parameter stays whole.
        tied: Whether the head has the table's matrix.
        clip: Largest norm; 0: any.
        predivided: Factor by which gradients are divided before they are reduced.
    """

    stage: int = 1
    accumulate: int = 2
    overlap: bool = False
    contiguous: bool = True
    bucket: int = 500_000_000
    robin: bool = False
    scatter: bool = True
    persistent: int = 0
    tied: bool = False
    clip: float = 1.0
    predivided: float = 1.0


def cases() -> Iterator[Case | Job]:
    """Return stages with accumulation and each option; and what DeepSpeed gives of parameters."""
    for stage, tied, robin in product((1, 2, 3), (False, True), (False, True)):
        setting = Setting(stage, 1, tied=tied, robin=robin)
        name = f"copies zero-{stage}{', tied' * tied}{', robin' * robin}"
        yield Case(name, partial(_copies, setting))
    for stage in (0, 1, 2, 3):
        for accumulate in (1, 2):
            usual = Setting(stage, accumulate)
            for some in (
                {},
                {"overlap": True},
                {"contiguous": False},
                {"bucket": 1000},
                {"bucket": 1000, "overlap": True},
                {"robin": True},
                {"scatter": False},
                {"persistent": 1000},
                {"tied": True},
                {"tied": True, "bucket": 1000},
                {"clip": 0.0},
                {"predivided": 2.0},
            ):
                yield _job(replace(usual, **some))


def _job(setting: Setting) -> Job:
    usual = asdict(Setting())
    told = [f"{n} {v}" for n, v in asdict(setting).items() if v != usual[n] and n != "stage"]
    name = f"zero-{setting.stage} {', '.join(told) or 'as usual'}"
    group = f"{setting.tied}-{setting.clip}"
    one = Setting(0, llama.SAMPLES, tied=setting.tied, clip=setting.clip)
    return Job(name, partial(_train, setting), partial(_train, one), group)


def _copies(setting: Setting) -> Errors:
    """Compare the copies in float32 that DeepSpeed gives with the parameters at the start."""
    model = llama.model(tied=setting.tied)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _engine(setting, model)
    return {
        name: error_of(safe_get_full_fp32_param(parameter), before[name])
        for name, parameter in model.named_parameters()
    }


def _engine(setting: Setting, model: LlamaForCausalLM) -> DeepSpeedEngine:
    settings = {
        "train_batch_size": llama.SAMPLES,
        "gradient_accumulation_steps": setting.accumulate,
        "gradient_clipping": setting.clip,
        "gradient_predivide_factor": setting.predivided,
        "prescale_gradients": setting.predivided != 1.0,
        "zero_optimization": {
            "stage": setting.stage,
            "overlap_comm": setting.overlap,
            "contiguous_gradients": setting.contiguous,
            "reduce_bucket_size": setting.bucket,
            "round_robin_gradients": setting.robin,
            "reduce_scatter": setting.scatter,
            "stage3_param_persistence_threshold": setting.persistent,
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def _train(setting: Setting) -> None:
    llama.meet()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = _engine(setting, llama.model(tied=setting.tied))
    data = llama.samples(llama.SAMPLES * llama.STEPS)
    each = llama.SAMPLES // setting.accumulate // ranks
    for step in range(llama.STEPS):
        some = data[step * llama.SAMPLES : (step + 1) * llama.SAMPLES][rank::ranks]
        for begin in range(0, len(some), each):
            batch = some[begin : begin + each]
            rows = {n: torch.stack([one[n] for one in batch]) for n in batch[0]}
            engine.backward(engine(**rows).loss)
            engine.step()
