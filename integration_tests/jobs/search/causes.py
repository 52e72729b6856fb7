"""What combinations are different for, as was seen by hand. No torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Why some combinations are different.

    Attributes:
        what: What happens, in a few words.
        names: Pattern of ``FAMILY: NAME`` of these combinations.
        report: File in `docs/found` that shows it; empty: none.
        known: Where others tell of it; empty: nowhere that was found.
    """

    what: str
    names: str
    report: str = ""
    known: str = ""


_SCALED = "https://github.com/pytorch/torchtitan/issues/1733"
_WEIGHTED = "https://github.com/pytorch/pytorch/issues/185167"
CAUSES = (
    Cause(
        "DTensor: the gradient of a mean loss is multiplied by the number of ranks",
        r"operators\w*: (mse_loss|smooth_l1|huber|margin) ",
        "torch-mean-loss-gradient-times-ranks.md",
    ),
    Cause(
        "DTensor: scans of a negative dim scan each shard by itself",
        r"operators\w*: (cumsum_minus|cumprod_minus|logcumsumexp|cumsum3)",
        "torch-scan-of-a-negative-dim.md",
    ),
    Cause(
        "DTensor: the sum of norms over a sharded dim is wrong",
        r"operators\w*: (norm_then_sum|norm_view|norm_stack_sum)",
        "torch-sum-of-norms.md",
    ),
    Cause(
        "DTensor: `gather` with an index of fewer rows reads other rows",
        r"operators\w*: gather_fewer",
        "torch-gather-of-fewer-rows.md",
    ),
    Cause(
        "GradScaler with DTensors: one rank skips an update that the other makes",
        r"updates: GradScaler",
        "torch-scaler-of-mixed-placements.md",
    ),
    Cause(
        "FSDP2: under HSDP a gradient is added to that of another parameter",
        r"sharded: experts-in-turn .*all-reduce",
        "torch-hsdp-gradient-of-another-parameter.md",
    ),
    Cause(
        "FSDP2: under HSDP a gradient comes one step late",
        r"sharded: (block-first|expert-first|blocks-in-turn) .*all-reduce",
        "torch-hsdp-gradient-of-the-step-before.md",
    ),
    Cause(
        "FSDP2: on a mesh of one rank a gradient is divided twice by its divisor",
        r"sharded: plain mesh (2x1|1),.*divisor",
        "torch-fsdp2-gradient-divided-twice.md",
    ),
    Cause(
        "`loss_parallel`: the gradient is wrong for scores of four dims",
        r"styles: loss_parallel (doubled|summed|each|ignoring|plain) of \[N, C, H, [WH]\]",
        "torch-loss-parallel-of-images.md",
    ),
    Cause(
        "Pipelining: the first step changes a model's buffers once more",
        r"schedules: \w+ (batch-norm|counting)",
        "torch-pipelining-buffers-of-the-first-step.md",
    ),
    Cause(
        "Pipelining: `eval()` divides gradients by the number of microbatches",
        r"schedules: .*evaluated-after",
        "torch-pipelining-evaluation-scales-gradients.md",
    ),
    Cause(
        "Pipelining: gradients that several steps accumulate are scaled by each",
        r"schedules: .*accumulated-scaled",
        known=_SCALED,
    ),
    Cause(
        "DTensor: a mean loss of sharded rows that count unequally",
        r"operators\w*: (cross_entropy_(weights|ignored)|multi_margin) ",
        known=_WEIGHTED,
    ),
)


def cause_of(family: str, name: str) -> Cause | None:
    """Return the cause of a difference, if it was looked into."""
    return next((one for one in CAUSES if re.search(one.names, f"{family}: {name}")), None)
