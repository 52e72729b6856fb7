"""One step of a pipeline schedule, and the text that stands for it.

The grammar is that of ``torch.distributed.pipelining``: ``[stage][type][microbatch]``, for example
``2F0``, ``3SEND_F1``, ``1UNSHARD``, and ``(0F1;1B0)OVERLAP_F_B`` for two steps fused into one.
``OVERLAP_B_F``, and ``RECOMPUTE``, ``OFFLOAD`` and ``RELOAD`` of what a microbatch keeps in a
stage, are the additions of this package.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
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
