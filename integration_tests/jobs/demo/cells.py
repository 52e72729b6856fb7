"""What the demo finds, as data: a file for each architecture. No torch."""

from typing import Any

import msgspec

EQUAL, DIFFERENT, DOUBTED, FAILED, REFUSED, WITHOUT = (
    "equal",
    "different",
    "not reproduced",
    "failed",
    "no plan",
    "no experts",
)
"""States of a cell. `DOUBTED`: the recorder calls it different or fails, and the same by hand does
not. `REFUSED`: transformers itself says that it has no such layout."""
RED = (DIFFERENT, DOUBTED, FAILED)


class Layout(msgspec.Struct, frozen=True):
    """A column.

    Attributes:
        sizes: Arguments of transformers' `DistributedConfig`.
        float64: Whether it is lifted to float64.
    """

    sizes: dict[str, int]
    float64: bool = True


LAYOUTS = {
    "fsdp 2": Layout({"fsdp_size": 2}),
    "tp 2": Layout({"tp_size": 2}),
    "ep 2": Layout({"fsdp_size": 2, "ep_size": 2}, float64=False),
    "tp 2 ep 2": Layout({"tp_size": 2, "ep_size": 2}),
}
"""With `ep 2` ranks have samples of their own, whose tokens they exchange; with `tp 2 ep 2` they
share all samples. `ep 2` is in float32: in float64, as in float16, torch 2.13 divides the gradients
of experts twice where a group that shards them has one rank."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An architecture in a layout.

    Attributes:
        layout: Key of `LAYOUTS`.
        state: One of those above.
        error: Largest relative error of a gradient or a weight; None: it is not finite, which JSON
            has no number for. So in `by_hand`.
        first: The first difference.
        likely: What it looks like.
        reason: Why it failed or was refused.
        compared: Tensors and numbers that were compared.
        unaligned: What was not, with the reason; the first of them.
        num_unaligned: How many.
        by_hand: What the same comparison in plain transformers says, without the recorder: name
            of a gradient, or of the loss or logits -> its relative error, the largest of them.
        by_hand_failed: Why it could not be done.
        program: The program that does so.
        seconds: What it took.
    """

    layout: str
    state: str
    error: float | None = 0.0
    first: str = ""
    likely: tuple[str, ...] = ()
    reason: str = ""
    compared: int = 0
    unaligned: dict[str, str] = {}
    num_unaligned: int = 0
    by_hand: dict[str, float | None] = {}
    by_hand_failed: str = ""
    program: str = ""
    seconds: float = 0.0


class Architecture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An architecture in all layouts.

    Attributes:
        name: Its type in transformers.
        versions: What has computed it.
        cells: One for each layout; none: it does not even train in one process.
        reason: Why not.
        num_parameters: Tensors that it has.
        fields: Fields of its tiny config.
        seconds: What all of it took.
    """

    name: str
    versions: dict[str, str]
    cells: tuple[Cell, ...] = ()
    reason: str = ""
    num_parameters: int = 0
    fields: dict[str, Any] = {}
    seconds: float = 0.0


class Bred(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job of the zoo beside one process.

    Attributes:
        layout: Its layout.
        bug: The bug that is in; empty: none.
        is_right: Whether the bug was found and named as it must be, or a sound job equal.
        first: The first difference.
        likely: What it looks like.
    """

    layout: str
    bug: str
    is_right: bool
    first: str = ""
    likely: tuple[str, ...] = ()
