"""Tensors that a checkpoint has, or that can be made of those it has under names that others use.

Names and shapes say how; nothing is read before `Made.read`. What is known: how rollout engines
fuse what the families of Hugging Face publish, and what packages with an entry point in the group
`hp_verify.names` add, a function of an open checkpoint and its tensors.

Shape symbols: E experts, D model width, F hidden width of an expert.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch
from torch import Tensor

from hp_verify.files.sources import Source
from hp_verify.recording.names import plain

STATE = re.compile(
    r"(^|\.)(optimizer|optim|optimizer_state_dict)(\.|$)|(^|\.)(exp_avg|exp_avg_sq|momentum_buffer)"
)
"""Names of what an optimizer keeps."""
OTHER = "#transposed"
"""End of the name of what has the same name and is laid otherwise than its family publishes it."""
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What engines lay one after the other, row by row."""
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_STACKED = {
    "w13_weight": (_GATES, _UPS),
    "w2_weight": (_DOWNS,),
    "gate_up_proj": (_GATES, _UPS),
    "down_proj": (_DOWNS,),
}
"""What engines and transformers stack, expert by expert: [E, 2F, D] and [E, D, F]."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a checkpoint has or gives.

    Attributes:
        shape: Its shape.
        parts: Names of the checkpoint's tensors behind it.
        read: Reads the values.
        how: Description of the steps that make it; empty: the checkpoint has it.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[], Tensor]
    how: str = ""

    def transposed(self) -> "Made":
        """Return this tensor with its last two dims exchanged."""
        how = ", ".join(filter(None, (self.how, "transposed")))
        shape = (*self.shape[:-2], *reversed(self.shape[-2:]))
        return Made(shape, self.parts, lambda: self.read().mT, how)


def known(source: Source) -> dict[str, Made]:
    """Return all tensors of a checkpoint that have values, by every name that is known for them."""
    found = {
        name: Made(entry.shape, (name,), entry.read)
        for name, entry in source.tensors.items()
        if entry.read is not None
    }
    added: dict[str, Made] = {}
    for point in entry_points(group="hp_verify.names"):
        added |= point.load()(source, found)
    return {**added, **found}


def short(name: str) -> str:
    """Strip from a name what wraps a model, and ``model.`` before it."""
    before, name = "", plain(name)
    while name != before:
        before, name = name, name.removeprefix("model.").removeprefix("module.")
    return name


def fused(name: str, there: Mapping[str, Made]) -> Made | None:
    """Return what an engine calls a tensor that it makes of several; None: no such rule is known.

    Args:
        name: Its name in the engine.
        there: Tensors of a checkpoint, by `short` names.
    """
    path, _, last = short(name).rpartition(".")
    module, _, own = path.rpartition(".")
    if own in _FUSED and last in ("weight", "bias"):
        names = [f"{module}.{part}.{last}".lstrip(".") for part in _FUSED[own]]
        parts = [there[n] for n in names if n in there]
        if len(parts) == len(names):
            return _concatenated(parts)
    if last in _STACKED:
        return _of_experts(path, _STACKED[last], there)
    return None


def _concatenated(parts: list[Made]) -> Made:
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    names = tuple(name for part in parts for name in part.parts)
    return Made(shape, names, lambda: torch.cat([part.read() for part in parts]), "concatenated")


def _of_experts(
    path: str, projections: tuple[tuple[str, ...], ...], there: Mapping[str, Made]
) -> Made | None:
    experts: list[list[Made]] = []
    while True:
        start = f"{path}.{len(experts)}"
        named = [[f"{start}.{own}.weight" for own in names] for names in projections]
        parts = [there[name] for names in named for name in names if name in there]
        if len(parts) < len(projections):
            break
        experts.append(parts)
    if not experts:
        return None
    width = sum(part.shape[0] for part in experts[0])
    return Made(
        (len(experts), width, experts[0][0].shape[1]),
        tuple(name for parts in experts for part in parts for name in part.parts),
        lambda: torch.stack([torch.cat([part.read() for part in parts]) for parts in experts]),
        "experts stacked",
    )
