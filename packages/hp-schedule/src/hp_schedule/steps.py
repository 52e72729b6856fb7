"""One step of a pipeline schedule: what it does, the text and the number that stand for it.

The grammar of the text is that of ``torch.distributed.pipelining``: ``[stage][type][microbatch]``,
for example ``2F0``, ``3SEND_F1``, ``1UNSHARD``, and ``(0F1;1B0)OVERLAP_F_B`` for two steps fused
into one. ``OVERLAP_B_F``, and ``RECOMPUTE``, ``OFFLOAD`` and ``RELOAD`` of what a microbatch keeps
in a stage, are the additions of this package.

A `MetaStep` is the view that people see. Passes and checks work on its code, a 64-bit integer, so
that a schedule of millions of steps stays small and quick:

    bits   0- 3   kind: the position of its type in `MetaStepType`
    bits   4-17   stage           bits  18-32   microbatch
    bits  33-46   stage           bits  47-61   microbatch     of an overlap's second half
    bit      62   an overlap's backward half is an input backward (I) instead of a full one (B)

-1 is an empty cell (a bubble); its kind reads as that of the last overlap, so codes that may be
empty are compared with 0 first. A code needs no table beside it, so passes may move codes between
rows and schedules freely.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final


class MetaStepType(Enum):
    """The action of a step; the value is its name in the text notation."""

    FWD = "F"
    BWD = "B"
    BWD_INPUT = "I"
    BWD_WEIGHT = "W"
    RECOMPUTE = "RECOMPUTE"
    FWD_SEND = "SEND_F"
    FWD_RECV = "RECV_F"
    BWD_SEND = "SEND_B"
    BWD_RECV = "RECV_B"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    FSDP_UNSHARD = "UNSHARD"
    FSDP_RESHARD = "RESHARD"
    FSDP_REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"
    OVERLAP_B_F = "OVERLAP_B_F"

    @property
    def is_compute(self) -> bool:
        """Tell whether the step occupies the rank's compute units (an overlap does)."""
        return self in _COMPUTE or self.is_overlap

    @property
    def is_fsdp(self) -> bool:
        """Tell whether the step concerns the parameters of a stage, not one microbatch."""
        return self.name.startswith("FSDP_")

    @property
    def is_overlap(self) -> bool:
        """Tell whether the step is a pair of compute steps."""
        return self.name.startswith("OVERLAP_")


_COMPUTE: Final = (
    MetaStepType.FWD,
    MetaStepType.BWD,
    MetaStepType.BWD_INPUT,
    MetaStepType.BWD_WEIGHT,
    MetaStepType.RECOMPUTE,
)
_OVERLAP_HALVES: Final = (MetaStepType.BWD, MetaStepType.BWD_INPUT)

_LEAF: Final = re.compile(r"([0-9]+)([A-Z]+(?:_[A-Z]+)*)([0-9]*)", re.ASCII)
_PAIR: Final = re.compile(r"\(([^();]+);([^();]+)\)(OVERLAP_[FB]_[FB])", re.ASCII)


@dataclass(frozen=True, slots=True)
class MetaStep:
    """One step of one rank's list.

    Attributes:
        type: Action of the step.
        stage_index: Index of the stage; None for an overlap, whose halves carry their own.
        microbatch_index: Index of the microbatch; None for an overlap and for the FSDP steps.
        sub_steps: The two halves of an overlap in their order, otherwise empty. One half is a
            forward, the other a full or an input backward.

    Raises:
        TypeError: If `type` is no MetaStepType, as in upstream's order of the fields.
        ValueError: If the fields do not fit the type.
    """

    type: MetaStepType
    stage_index: int | None = None
    microbatch_index: int | None = None
    sub_steps: tuple["MetaStep", ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.type, MetaStepType):
            raise TypeError(
                f"type ({self.type!r}) must be a MetaStepType: MetaStep(type, stage_index, "
                "microbatch_index, sub_steps); upstream has the microbatch first"
            )
        if self.type.is_overlap:
            self._check_overlap()
            return
        if self.sub_steps:
            raise ValueError(f"sub_steps ({len(self.sub_steps)}) must be 0 for {self.type.name}")
        if self.stage_index is None or self.stage_index < 0:
            raise ValueError(f"stage_index ({self.stage_index}) must be >= 0 for {self.type.name}")
        if self.type.is_fsdp:
            if self.microbatch_index is not None:
                raise ValueError(
                    f"microbatch_index ({self.microbatch_index}) must be None for {self.type.name}"
                )
        elif self.microbatch_index is None or self.microbatch_index < 0:
            raise ValueError(
                f"microbatch_index ({self.microbatch_index}) must be >= 0 for {self.type.name}"
            )

    def _check_overlap(self) -> None:
        if self.stage_index is not None or self.microbatch_index is not None:
            raise ValueError(f"stage_index and microbatch_index must be None for {self.type.name}")
        types = tuple(step.type for step in self.sub_steps)
        ordered = types if self.type is MetaStepType.OVERLAP_F_B else types[::-1]
        if len(types) != 2 or ordered[0] is not MetaStepType.FWD:
            shown = ";".join(step.value for step in types)
            raise ValueError(f"sub_steps ({shown}) must fit {self.type.name}")
        if ordered[1] not in _OVERLAP_HALVES:
            raise ValueError(f"sub_steps ({ordered[1].value}) must be B or I beside a forward")

    def __str__(self) -> str:
        if self.sub_steps:
            return f"({';'.join(map(str, self.sub_steps))}){self.type.value}"
        microbatch = "" if self.microbatch_index is None else str(self.microbatch_index)
        return f"{self.stage_index}{self.type.value}{microbatch}"

    @classmethod
    def from_str(cls, text: str) -> "MetaStep":
        """Read a step; the exact inverse of ``str``.

        Args:
            text: Step as text, for example ``2F0`` or ``(0F1;1B0)OVERLAP_F_B``. Blanks around it
                are allowed, anything else beside the step is not.

        Raises:
            ValueError: If the text is no step.
        """
        text = text.strip()
        if pair := _PAIR.fullmatch(text):
            halves = (cls.from_str(pair[1]), cls.from_str(pair[2]))
            return cls(MetaStepType(pair[3]), sub_steps=halves)
        if (leaf := _LEAF.fullmatch(text)) and leaf[2] in LEAF_TYPES:
            microbatch = int(leaf[3]) if leaf[3] else None
            return cls(LEAF_TYPES[leaf[2]], int(leaf[1]), microbatch)
        raise ValueError(
            f"step ({text!r}) must be [stage][type][microbatch], for example 2F0, 3SEND_F1, "
            "1UNSHARD or (0F1;1B0)OVERLAP_F_B"
        )

    def leaves(self) -> Iterator["MetaStep"]:
        """Yield the step itself, or the halves of an overlap in their order."""
        yield from self.sub_steps or (self,)


LEAF_TYPES: Final = {kind.value: kind for kind in MetaStepType if not kind.is_overlap}


BUBBLE: Final = -1

KIND_MASK: Final = 0xF
STAGE_SHIFT: Final = 4
STAGE_MASK: Final = 0x3FFF
MICROBATCH_SHIFT: Final = 18
MICROBATCH_MASK: Final = 0x7FFF
PLACE_MASK: Final = (1 << MICROBATCH_SHIFT) - 1
"""The bits of a code that say kind and stage; of an overlap, the stage of its first half."""
_SECOND_SHIFT: Final = 29
_INPUT_HALF: Final = 1 << 62
ANY_MICROBATCH: Final = ~(
    MICROBATCH_MASK << MICROBATCH_SHIFT | MICROBATCH_MASK << MICROBATCH_SHIFT + _SECOND_SHIFT
)
"""Masks the microbatches out of a code, both of an overlap's; an empty cell stays negative."""

MAX_STAGES: Final = STAGE_MASK + 1
MAX_MICROBATCHES: Final = MICROBATCH_MASK + 1

TYPES: Final = tuple(MetaStepType)
KIND: Final = {kind: index for index, kind in enumerate(TYPES)}

FWD: Final = KIND[MetaStepType.FWD]
BWD: Final = KIND[MetaStepType.BWD]
BWD_INPUT: Final = KIND[MetaStepType.BWD_INPUT]
BWD_WEIGHT: Final = KIND[MetaStepType.BWD_WEIGHT]
RECOMPUTE: Final = KIND[MetaStepType.RECOMPUTE]
FWD_SEND: Final = KIND[MetaStepType.FWD_SEND]
FWD_RECV: Final = KIND[MetaStepType.FWD_RECV]
BWD_SEND: Final = KIND[MetaStepType.BWD_SEND]
BWD_RECV: Final = KIND[MetaStepType.BWD_RECV]
OFFLOAD: Final = KIND[MetaStepType.OFFLOAD]
RELOAD: Final = KIND[MetaStepType.RELOAD]
FSDP_UNSHARD: Final = KIND[MetaStepType.FSDP_UNSHARD]
FSDP_RESHARD: Final = KIND[MetaStepType.FSDP_RESHARD]
FSDP_REDUCE_GRAD: Final = KIND[MetaStepType.FSDP_REDUCE_GRAD]
OVERLAP_F_B: Final = KIND[MetaStepType.OVERLAP_F_B]
OVERLAP_B_F: Final = KIND[MetaStepType.OVERLAP_B_F]
FSDP_KINDS: Final = frozenset({FSDP_UNSHARD, FSDP_RESHARD, FSDP_REDUCE_GRAD})
RETENTION_KINDS: Final = frozenset({RECOMPUTE, OFFLOAD, RELOAD})
"""Steps that decide what a microbatch keeps in a stage between its forward and its backward."""

# The hot loops compare kinds instead of looking them up: compute steps (F, B, I, W, RECOMPUTE) come
# first, then communication, then copies (OFFLOAD, RELOAD), then FSDP, then overlaps. `MetaStepType`
# lists its members in this order.
FIRST_COMMUNICATION: Final = FWD_SEND
FIRST_COPY: Final = OFFLOAD
FIRST_FSDP: Final = FSDP_UNSHARD
FIRST_OVERLAP: Final = OVERLAP_F_B

SEND_OF: Final = {FWD: FWD_SEND, BWD: BWD_SEND, BWD_INPUT: BWD_SEND}
"""The kind of step that sends what a kind of compute step writes."""
RECEIVE_OF: Final = {FWD: FWD_RECV, BWD: BWD_RECV, BWD_INPUT: BWD_RECV}
"""The kind of step that receives what a kind of compute step reads."""


def encode(kind: int, stage: int, microbatch: int = 0) -> int:
    """Return the code of a step that is no overlap."""
    return kind | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def encode_overlap(first: int, second: int) -> int:
    """Return the code of the overlap of two steps: one F with one B or I, in this order."""
    forward_first = first & KIND_MASK == FWD
    backward = second if forward_first else first
    kind = OVERLAP_F_B if forward_first else OVERLAP_B_F
    code = kind | (first & ~KIND_MASK) | (second & ~KIND_MASK) << _SECOND_SHIFT
    return code | _INPUT_HALF if backward & KIND_MASK == BWD_INPUT else code


def halves(code: int) -> tuple[int, int]:
    """Return the codes of an overlap's two steps, in their order."""
    backward = BWD_INPUT if code & _INPUT_HALF else BWD
    forward_first = code & KIND_MASK == OVERLAP_F_B
    first, second = (FWD, backward) if forward_first else (backward, FWD)
    place = STAGE_MASK << STAGE_SHIFT | MICROBATCH_MASK << MICROBATCH_SHIFT
    return first | code & place, second | code >> _SECOND_SHIFT & place


def leaves(code: int) -> tuple[int, ...]:
    """Return the codes of the steps a code stands for: two of an overlap, otherwise itself."""
    return halves(code) if code >= 0 and code & KIND_MASK >= FIRST_OVERLAP else (code,)


def is_compute(code: int) -> bool:
    """Tell whether a code is a compute step (an overlap is); False for an empty cell."""
    kind = code & KIND_MASK
    return code >= 0 and (kind < FIRST_COMMUNICATION or kind >= FIRST_OVERLAP)


def pack(step: MetaStep | None) -> int:
    """Return the code of a step; None is an empty cell.

    Raises:
        ValueError: If an index does not fit its bits.
    """
    if step is None:
        return BUBBLE
    if step.sub_steps:
        return encode_overlap(pack(step.sub_steps[0]), pack(step.sub_steps[1]))
    stage = step.stage_index or 0
    microbatch = step.microbatch_index or 0
    if stage >= MAX_STAGES:
        raise ValueError(f"stage_index ({stage}) must be < {MAX_STAGES}")
    if microbatch >= MAX_MICROBATCHES:
        raise ValueError(f"microbatch_index ({microbatch}) must be < {MAX_MICROBATCHES}")
    return encode(KIND[step.type], stage, microbatch)


@lru_cache(maxsize=1 << 16)
def unpack(code: int) -> MetaStep:
    """Return the step of a code that is no empty cell."""
    kind = TYPES[code & KIND_MASK]
    if kind.is_overlap:
        first, second = halves(code)
        return MetaStep(kind, sub_steps=(unpack(first), unpack(second)))
    stage = code >> STAGE_SHIFT & STAGE_MASK
    if kind.is_fsdp:
        return MetaStep(kind, stage)
    return MetaStep(kind, stage, code >> MICROBATCH_SHIFT & MICROBATCH_MASK)
