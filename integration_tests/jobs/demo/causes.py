"""Why cells are red, as transformers' source tells for one version of it. No torch."""

from dataclasses import dataclass

VERSION = "5.23.0"
"""Of transformers, which the causes below are about."""


@dataclass(frozen=True)
class Cause:
    """Why some cells are red.

    Attributes:
        what: What happens.
        why: Where, and why.
        cells: Architectures -> layouts.
    """

    what: str
    why: str
    cells: dict[str, tuple[str, ...]]


_DATA, _ALL = ("fsdp 2", "ep 2"), ("fsdp 2", "tp 2")
CAUSES = (
    Cause(
        "Other weights are loaded, without a word",
        "A checkpoint has other tensors than the model: `conversion_mapping.py` joins, parts or "
        "interleaves them as they are loaded. With a `distributed_config` a rank reads its part of "
        "the checkpoint's tensors, and converts that: parts of q, k and v are joined where its "
        "part of the joined q, k and v belongs (`conv1d`, `Concatenate`), rows of a fused matrix "
        "go to another (`gqkv_proj`, `Chunk`), gate and up are interleaved by rank (`w13_weight`, "
        "`Interleave`). One process loads what was saved, two ranks do not.",
        {
            "bailing_hybrid": _DATA,
            "kimi_linear": _DATA,
            "olmo_hybrid": ("fsdp 2",),
            "hrm_text": _ALL,
            "inkling2_text": ("tp 2",),
        },
    ),
    Cause(
        "A buffer is what memory held",
        "`mup_vector` of the mixers is in no checkpoint. It is computed by `_init_weights` of the "
        "model, and with `fsdp_size` it is not there after loading: the buffer has whatever values "
        "its memory had, which are other ones on each rank.",
        {"falcon_h1": ("fsdp 2",)},
    ),
    Cause(
        "A gradient lacks the other rank's part",
        "`up_proj` is cut by columns, so each rank gives its half to `act_fn`, whose learned "
        "`alpha_p` and `alpha_n` both ranks have: their gradients are those of half of the "
        "features, and the plan does not name them (`replicated_with_grad_allreduce`). Ranks then "
        "hold different weights.",
        {"apertus": ("tp 2",)},
    ),
    Cause(
        "Statistics are those of half of the features",
        "`_gaussian_topk` takes mean and deviation over the last dim of `gate_proj`, of which a "
        "rank has its columns (`colwise`): each cuts off at another value than one process.",
        {"gemma3n_text": ("tp 2",)},
    ),
    Cause(
        "A step cannot be taken: tensors and DTensors meet",
        "The plan cuts a module whose weight or output the model also uses elsewhere: the "
        "embedding's row for padding (gemma4), what it gives to a norm in it (inkling_text). In "
        "lfm2 and lfm3 it cuts the head alone, whose weight is then the embedding's again, whole.",
        dict.fromkeys(("gemma4", "inkling_text", "lfm2", "lfm3"), ("tp 2", "tp 2 ep 2")),
    ),
    Cause(
        "A step cannot be taken: a mask has all heads",
        "Queries are cut by heads; `dt_proj`, of which the mask is made, gives all (`rowwise`).",
        {"doge": ("tp 2",)},
    ),
    Cause(
        "A step cannot be taken: a view is changed in place",
        "What the shared expert gives is the view of a DTensor; `out.add_` of what experts give "
        "is refused by autograd.",
        dict.fromkeys(("llama4", "llama4_text"), ("tp 2",)),
    ),
)


def cause_of(name: str, layout: str, version: str) -> Cause | None:
    """The cause of a red cell, if it is known.

    Args:
        name: Architecture.
        layout: Layout.
        version: Version of transformers that computed it.
    """
    if version != VERSION:
        return None
    return next((cause for cause in CAUSES if layout in cause.cells.get(name, ())), None)
