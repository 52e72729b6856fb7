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
        "DTensor: a reduction over `dim=[]` reduces each shard; gradients of `amax()`",
        r"operators\w*: (norm_inf|norm_minus_inf|max_then_negative|sum_then_max) ",
        "torch-reductions-of-no-dims.md",
    ),
    Cause(
        "DTensor: mean losses of unevenly sharded tensors are means of means",
        r"operators\w*: bce (uneven|lone)",
        "torch-mean-of-uneven-shards.md",
    ),
    Cause(
        "DTensor: `index_add_` along the sharded dim leaves a tensor of another shape",
        r"operators\w*: index_add_ ",
        "torch-index-add-in-place.md",
    ),
    Cause(
        "Pipelining: in zero-bubble schedules the stage behind a frozen one has no gradients",
        r"schedules: \w+ all-frozen",
        "torch-zero-bubble-behind-a-frozen-stage.md",
    ),
    Cause(
        "Pipelining: in zero-bubble schedules a hook changes weights' gradients twice",
        r"schedules: \w+ penalised",
        "torch-zero-bubble-hook-called-twice.md",
    ),
    Cause(
        "DTensor: an embedding's gradient is scaled by the frequency of words on one rank",
        r"operators\w*: embedding_scaled",
        "torch-embedding-scaled-by-frequency.md",
    ),
    Cause(
        "DTensor: views and sums of a row-wise sharded embedding use its mask elsewhere",
        r"operators\w*: embedding_(select|sum|t|view|cat) ",
        "torch-views-of-a-rowwise-embedding.md",
    ),
    Cause(
        "Pipelining: `eval()` between accumulated steps drops gradients under FSDP2",
        r"schedules: .*sharded-evaluated-between",
        "torch-pipelining-evaluation-loses-gradients.md",
    ),
    Cause(
        "DTensor: `view(dtype)` of a partial tensor reinterprets its parts",
        r"operators\w*: view_dtype",
        "torch-view-of-another-dtype.md",
    ),
    Cause(
        "DTensor: a batch norm of split channels leaves replicated statistics as they were",
        r"operators\w*: batch_norm_stats",
        "torch-batch-norm-of-split-channels.md",
    ),
    Cause(
        "DeepSpeed: with `round_robin_gradients` a parameter's copy is that of another",
        r"deepspeeded: copies zero-[12].*robin",
        "deepspeed-round-robin-copies.md",
    ),
    Cause(
        "`loss_parallel`: gradients of `log_softmax` by itself, and of smoothed labels",
        r"styles: (loss_parallel (entropy|divergence|with_entropy|smoothed)|plan .*smoothing)",
        known="its documentation: of losses `cross_entropy` alone, without smoothing",
    ),
    Cause(
        "`torch.distributed.nn.functional.broadcast` in a group that is not all: no gradient",
        r"collectives: broadcast",
        known="https://github.com/pytorch/pytorch/issues/130515",
    ),
    Cause(
        "`torch.distributed.nn.functional`: gradients of means and maxima over ranks",
        r"collectives: (all_reduce|reduce|reduce_scatter) ",
        "torch-gradient-of-a-mean-over-ranks.md",
    ),
    Cause(
        "DTensor: redistribution over a flattened mesh of unevenly sharded tensors",
        r"redistributions: .*flattened",
        known="https://github.com/pytorch/pytorch/pull/194457",
    ),
    Cause(
        "DTensor: convolutions compute with parts that their strategy would have put together",
        r"operators\w*: conv\w* ",
        known="https://github.com/pytorch/pytorch/pull/186129, of channels",
    ),
    Cause(
        "DTensor: a threshold below its value, of partial maxima",
        r"operators\w*: threshold",
        known="a comment in `_pointwise_ops.py`",
    ),
    Cause(
        "`torch._foreach_powsum`, which is private, of partial sums",
        r"updates: foreach_powsum|operators\w*: powsum",
        known="private",
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
