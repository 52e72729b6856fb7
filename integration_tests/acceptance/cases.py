"""What there is to run on a machine, the most telling first. No torch.

Every layout is compared with one process on the same device by `hp verify`, with its
bounds. In float64 nothing but the order of sums differs, so a wrong sum is told from rounding by
ten orders of magnitude; every NVIDIA GPU computes it as IEEE 754 says, and at this size it does not
matter that some do so at a 64th of their rate. float32 and bfloat16 run as well, with the wider
bounds that `hp verify` states, since their kernels are others.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from hp_trainer.layout.schedules import KINDS

PREREQUISITE = "one process"
AGAINST_CPU = "against the CPU"
TIMED = ("rates", "train", "plan", "dry_run", "rival")
"""Kinds of work that are about time."""
_BF16_SINCE = (8, 0)
_ORDER_SINCE = (2, 26)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases of a machine depend on.

    Attributes:
        device: Kind of the devices, `"cpu"` or `"cuda"`.
        name: Name of the GPU, as CUDA reports it; empty on a CPU.
        num_gpus: GPUs of this machine that are used.
        max_ranks: Most ranks that a layout may have on this machine.
        shares: Whether NCCL serves several ranks on one GPU.
        capability: Compute capability of the GPU, major and minor.
        memory_bytes: Bytes of memory of one device.
        nccl: Version of NCCL; empty: there is none.
    """

    device: str
    name: str = ""
    num_gpus: int = 0
    max_ranks: int = 2
    shares: bool = False
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    nccl: tuple[int, ...] = ()

    @property
    def has_bf16(self) -> bool:
        """Whether products in bfloat16 are computed and not emulated."""
        return self.device == "cpu" or self.capability >= _BF16_SINCE

    def backend(self, num_ranks: int) -> str:
        """Value of `launch.backend` for so many ranks."""
        shared = self.device == "cuda" and num_ranks > self.num_gpus and not self.shares
        return "gloo" if shared else "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to run.

    Attributes:
        name: Name that tells it from all others.
        what: Purpose of the case, a sentence.
        work: Name of the function of `integration_tests.acceptance.work` that runs it.
        keys: Config overrides of the case, by key.
        ranks: Number of ranks that it needs.
        dtype: Dtype of its computation, such as `"float64"`.
        env: Environment variables of its process and its ranks.
        seconds: Seconds that it may take.
        needs: Names of the cases that must pass first.
        is_quick: Whether it is among the few that stand for all.
        on_gpu: Whether it says something on GPUs alone.
        left_out: Reason why this machine cannot run it; empty: it can.
    """

    name: str
    what: str
    work: str
    keys: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    dtype: str = "float64"
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 180.0
    needs: tuple[str, ...] = (PREREQUISITE,)
    is_quick: bool = False
    on_gpu: bool = False
    left_out: str = ""


def slug(name: str) -> str:
    """The name of a case as that of a file."""
    return "-".join(re.findall(r"\w+", name))


def cases_of(place: Place) -> list[Case]:
    """All cases of a machine in their order; names are unique."""
    found = [
        *_first(place),
        *_AXES,
        *_speed(place),
        *_schedules(),
        *_others(place),
        *_checkers(place),
        *_LARGE,
        _TESTS,
    ]
    return [_fitted(case, place) for case in found]


def _fitted(case: Case, place: Place) -> Case:
    if case.on_gpu and place.device != "cuda":
        return replace(case, left_out="there is no GPU")
    if case.left_out:
        return case
    if case.ranks > place.max_ranks:
        why = f"ranks ({case.ranks}) must be at most those of this machine ({place.max_ranks})"
        return replace(case, left_out=why)
    if case.dtype == "bfloat16" and not place.has_bf16:
        major, minor = place.capability
        return replace(case, left_out=f"sm_{major}{minor} has no bfloat16")
    return case


def _first(place: Place) -> Iterator[Case]:
    yield Case(
        name=PREREQUISITE,
        what="One process against an oracle in plain torch, in float64.",
        work="reference",
        needs=(),
        is_quick=True,
    )
    largest = max((c.ranks for c in _combined() if c.ranks <= place.max_ranks), default=0)
    yield from (replace(case, is_quick=True) for case in _combined() if case.ranks == largest)


def _layout(name: str, what: str, ranks: int, keys: str, **rest: object) -> Case:
    pairs = dict(key.split("=", 1) for key in keys.split())
    return Case(name=name, what=what, work="layout", keys=pairs, ranks=ranks, **rest)  # type: ignore[arg-type]


def _combined() -> list[Case]:
    """Several axes at once: where most can go wrong."""
    what = "Several kinds of parallelism at once."
    return [
        _layout(
            "pp 2, interleaved",
            "A pipeline of two ranks with two stages each.",
            2,
            "mesh.pp=2 pipeline.schedule=interleaved_1f1b pipeline.stages_per_rank=2",
        ),
        _layout(
            "pp 2 x fsdp 2, ep 2",
            what,
            4,
            "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 pipeline.schedule=zbv pipeline.stages_per_rank=2",
        ),
        _layout(
            "pp 2 x fsdp 2 x tp 2, ep 4",
            what,
            8,
            "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 mesh.ep=4 pipeline.schedule=interleaved_1f1b "
            "pipeline.stages_per_rank=2",
        ),
    ]


_AXES = (
    _layout("dp_shard 2", "Parameters sharded by FSDP2.", 2, "mesh.dp_shard=2", is_quick=True),
    _layout(
        "dp_shard 2, by block",
        "Parameters gathered and gradients reduced block by block.",
        2,
        "mesh.dp_shard=2 mesh.gather=block",
    ),
    _layout("tp 2", "Tensor and sequence parallelism.", 2, "mesh.tp=2"),
    _layout("cp 2, heads", "A sequence over two ranks, heads exchanged.", 2, "mesh.cp=2"),
    _layout(
        "cp 2, gathered",
        "A sequence over two ranks, keys gathered.",
        2,
        "mesh.cp=2 mesh.cp_heads=1",
    ),
    _layout(
        "cp 2, ring", "A sequence over two ranks, keys in a ring.", 2, "mesh.cp=2 mesh.cp_ring=true"
    ),
    _layout(
        "ep 2", "Experts dealt out to two ranks.", 2, "mesh.dp_shard=2 mesh.ep=2", is_quick=True
    ),
    _layout("etp 2", "Each expert cut in two.", 2, "mesh.dp_replicate=2 mesh.etp=2"),
    _layout("dp_replicate 2", "Replicas whose gradients are summed.", 2, "mesh.dp_replicate=2"),
    _layout(
        "recompute", "Blocks computed again in backward.", 2, "mesh.dp_shard=2 train.recompute=full"
    ),
    _layout(
        "bfloat16",
        "What most train in; tokens go to all experts, as rounding would decide choices of some.",
        2,
        "mesh.dp_shard=2 mesh.ep=2 model.top_k=8",
        dtype="bfloat16",
    ),
    _layout(
        "float32",
        "Other kernels than in bfloat16.",
        2,
        "mesh.dp_shard=2 mesh.ep=2",
        dtype="float32",
    ),
    _layout(
        "joined documents",
        "Attention over whole sequences; everywhere else it stops at the end of a document.",
        2,
        "mesh.cp=2 data.documents=joined",
    ),
)
"""One axis at a time."""


def _schedules() -> Iterator[Case]:
    for schedule, kind in KINDS.items():
        stages = kind.stages_per_rank or 2
        yield _layout(
            f"pp 2, {schedule}",
            "A pipeline of two ranks.",
            2,
            f"mesh.pp=2 pipeline.schedule={schedule} pipeline.stages_per_rank={stages}",
        )


def _others(place: Place) -> list[Case]:
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    return [
        _layout(
            "overlap, interleaved_1f1b",
            "Exchanges of experts behind another microbatch.",
            4,
            "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 pipeline.schedule=interleaved_1f1b "
            "pipeline.stages_per_rank=2 pipeline.overlap=true",
        ),
        _layout(
            "overlap, dualpipe_v",
            "Exchanges of experts behind another microbatch.",
            4,
            "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 pipeline.schedule=dualpipe_v "
            "pipeline.stages_per_rank=2 pipeline.overlap=true",
        ),
        _layout(
            "unequal stages",
            "Stages with tensor-parallel sizes of their own.",
            3,
            "mesh.pp=2 mesh.stage_tp=[1,2] pipeline.schedule=1f1b",
        ),
        _layout(
            "cp 2 x tp 2, etp 2",
            "What a sequence and its matrices are cut by, at once.",
            4,
            "mesh.cp=2 mesh.tp=2 mesh.etp=2",
        ),
        _layout(
            "hsdp, ep 2", "Replicas of shards.", 4, "mesh.dp_replicate=2 mesh.dp_shard=2 mesh.ep=2"
        ),
        _layout(
            "tied, two tokens ahead",
            "One table at both ends, multi-token prediction.",
            2,
            "mesh.pp=2 pipeline.schedule=zero_bubble model.tie_embeddings=true "
            "model.num_mtp_modules=1",
        ),
        _layout(
            "compile",
            f"Blocks through torch.compile, {backend}.",
            2,
            f"mesh.dp_shard=2 train.compile={backend}",
            seconds=420.0,
        ),
        _layout(
            AGAINST_CPU,
            "A layout on GPUs against one process on the CPU, checkpoint included.",
            2,
            "mesh.dp_shard=2 mesh.ep=2",
            on_gpu=True,
        ),
    ]


def _checkers(place: Place) -> list[Case]:
    """The same layouts under what finds races and wrong orders."""
    keys = "mesh.pp=2 pipeline.schedule=interleaved_1f1b pipeline.stages_per_rank=2"
    ranks = 2
    if place.max_ranks >= 4:
        ranks, keys = 4, f"mesh.dp_shard=2 mesh.ep=2 {keys}"
    shared = f"{ranks} ranks share a GPU through Gloo, not NCCL"
    why_not = shared if place.backend(ranks) == "gloo" else ""
    too_old = "" if place.nccl >= _ORDER_SINCE else "NCCL has it since 2.26"
    return [
        _layout(
            "launch order",
            "NCCL orders what its communicators launch, and ends a race of threads.",
            ranks,
            keys,
            on_gpu=True,
            left_out=why_not or too_old,
            env={"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_LAUNCH_RACE_FATAL": "1"},
        ),
        _layout(
            "detail",
            "torch compares shapes and order of collectives between ranks.",
            ranks,
            keys,
            left_out=why_not,
            env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        ),
        _layout(
            "stream sanitizer",
            "torch's CUDA sanitizer looks for streams that do not wait.",
            2,
            "mesh.dp_shard=2 mesh.ep=2",
            on_gpu=True,
            seconds=300.0,
            env={"TORCH_CUDA_SANITIZER": "1"},
        ),
        _layout(
            "blocking launches",
            "Every kernel is waited for: what passes only so has a race.",
            2,
            "mesh.dp_shard=2 mesh.ep=2",
            on_gpu=True,
            env={"CUDA_LAUNCH_BLOCKING": "1"},
        ),
        Case(
            name="fork",
            what="What ranks are forked from has not touched the GPU.",
            work="fork",
            needs=(),
            on_gpu=True,
        ),
    ]


_TESTS = Case(
    name="tests",
    what="The tests of the packages that need a GPU, where this is a checkout with pytest.",
    work="tests",
    needs=(),
    seconds=900.0,
    on_gpu=True,
)


_LARGE = (
    _layout(
        "fsdp 8, ep 8",
        "What large models of experts use on one node.",
        8,
        "mesh.dp_shard=8 mesh.ep=8",
    ),
    _layout("cp 4 x tp 2", "Long sequences.", 8, "mesh.cp=4 mesh.tp=2 mesh.ep=4"),
    _layout("pp 8", "A long pipeline.", 8, "mesh.pp=8 pipeline.schedule=1f1b model.num_layers=8"),
)
"""What takes a whole node."""


def _speed(place: Place) -> Iterator[Case]:
    """Whole steps of a model that fills a part of the device's memory."""
    dtype = "bfloat16" if place.has_bf16 and place.device == "cuda" else "float32"
    ranks = max(1, place.num_gpus) if place.device == "cuda" else 2
    case = partial(Case, dtype=dtype)
    yield case(
        name="rates",
        what="What a product and a copy reach on one device.",
        work="rates",
        needs=(),
        is_quick=True,
    )
    for model, what in (("moe", "A mixture of experts"), ("dense", "A dense model")):
        for count in sorted({1, ranks}, reverse=True):
            name, is_quick = f"{model} on {count}", model == "moe" and count == ranks
            yield case(
                name=name,
                what=f"{what}: tokens per second, MFU, memory, a trace.",
                work="train",
                keys={"model": model},
                ranks=count,
                needs=(),
                seconds=300.0,
                is_quick=is_quick,
            )
            yield case(
                name=f"plan of {name}",
                what="`hp plan` against what was measured.",
                work="plan",
                keys={"of": name},
                needs=(name, "rates"),
                seconds=120.0,
                is_quick=is_quick,
            )
            yield case(
                name=f"dry run of {name}",
                what="`hp dry-run` against what was measured.",
                work="dry_run",
                keys={"of": name},
                needs=(name,),
                seconds=240.0,
            )
        rivals = ("transformers", "torchtitan") if model == "dense" else ("transformers",)
        for rival in rivals:
            yield case(
                name=f"{model} in {rival}",
                what=f"The same model in {rival}, on one device.",
                work="rival",
                keys={"of": f"{model} on 1", "rival": rival},
                needs=(f"{model} on 1",),
                seconds=240.0,
            )


def cases_over(num_nodes: int, each: int) -> list[Case]:
    """Layouts over several machines of so many ranks each: what is split between machines."""
    ranks = num_nodes * each
    common = f"train.microbatch_size=1 train.global_batch_size={2 * ranks}"
    layouts = (
        ("parameters", f"mesh.dp_shard={ranks}"),
        ("experts", f"mesh.dp_shard={ranks} mesh.ep={math.gcd(ranks, 8)}"),
        ("pipeline", f"mesh.pp={num_nodes} mesh.dp_shard={each} pipeline.schedule=1f1b"),
        ("replicas", f"mesh.dp_replicate={num_nodes} mesh.dp_shard={each}"),
    )
    return [
        _layout(
            f"{num_nodes} nodes, {name}",
            f"{name.capitalize()} split between machines.",
            ranks,
            f"{keys} {common}",
            needs=(),
        )
        for name, keys in layouts
    ]


def chosen(cases: Sequence[Case], only: Sequence[str], *, quick: bool) -> list[Case]:
    """Those cases whose name begins with one of `only`, or the quick ones; with what they need."""
    wanted = [
        case.name
        for case in cases
        if (not quick or case.is_quick) and (not only or case.name.startswith(tuple(only)))
    ]
    by_name = {case.name: case for case in cases}
    pending = list(wanted)
    while pending:
        pending += (more := [n for n in by_name[pending.pop()].needs if n not in wanted])
        wanted += more
    return [case for case in cases if case.name in wanted]
