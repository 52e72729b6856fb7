"""Tensors that a checkpoint has, or that can be made of those it has under names that others use.

Names and shapes say how; nothing is read before `Made.read`. What is known: the families of Hugging
Face for checkpoints of hp-train, and how rollout engines fuse what these families publish.

Shape symbols: E experts, D model width, F hidden width of an expert.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from hp_train.compared.sources import Source
from hp_train.config import Config
from hp_train.errors import ConfigError
from hp_train.hugging_face.config import FAMILIES, hf_config
from hp_train.hugging_face.family import Stacking
from hp_train.hugging_face.plan import Stored, stored_tensors, to_theirs
from hp_train.jobs.names import plain
from hp_train.model.shapes import model_tensors

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
        read: Gives its values.
        how: How it is made, for people; empty: it is there.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[], Tensor]
    how: str = ""

    def transposed(self) -> "Made":
        """The same with its last two dims exchanged."""
        how = ", ".join(filter(None, (self.how, "transposed")))
        shape = (*self.shape[:-2], *reversed(self.shape[-2:]))
        return Made(shape, self.parts, lambda: self.read().mT, how)


def known(source: Source) -> dict[str, Made]:
    """All tensors of a checkpoint whose values are there, by the names that are known for them."""
    found = {
        name: Made(entry.shape, (name,), entry.read)
        for name, entry in source.tensors.items()
        if entry.read is not None
    }
    return {**_published(source, found), **found}


def short(name: str) -> str:
    """Name without what wraps a model, and without ``model.`` before it."""
    before, name = "", plain(name)
    while name != before:
        before, name = name, name.removeprefix("model.").removeprefix("module.")
    return name


def fused(name: str, there: Mapping[str, Made]) -> Made | None:
    """What an engine calls a tensor that it makes of several; None: no such rule is known.

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


def _published(source: Source, found: Mapping[str, Made]) -> dict[str, Made]:
    """Tensors under the names of the Hugging Face family of hp-train's own model."""
    embedding = source.tensors.get("model.embedding.weight")
    if source.config is None or embedding is None:
        return {}
    try:
        config = msgspec.convert(source.config, Config)
        model = replace(
            config.model,
            vocab_size=embedding.shape[0],
            max_positions=config.model.max_positions or config.data.seq_len,
        )
        family = FAMILIES[hf_config(model, dtype="float32")["model_type"]]
    except (msgspec.ValidationError, ConfigError):
        return {}
    tensors = model_tensors(model)
    made: dict[str, Made] = {}
    stackings: list[Stacking] = [family.stacking, "none", "concatenated", "interleaved"]
    for stacking in stackings:
        for stored in stored_tensors(tensors, model, family, stacking=stacking):
            parts = [found.get(f"model.{part}") for part in stored.parts]
            here = [part for part in parts if part is not None]
            if len(here) == len(parts):
                one = _stored(stored, here)
                if made.setdefault(stored.name, one).how != one.how:
                    made.setdefault(f"{stored.name}{OTHER}", one)
    return made


def _stored(stored: Stored, parts: list[Made]) -> Made:
    def read() -> Tensor:
        values = [part.read() for part in parts]
        if stored.expert is not None:
            values = [value[stored.expert] for value in values]
        if stored.arrangement == "concatenated":
            return torch.cat(values, dim=1)
        return to_theirs(stored, values)

    names = tuple(name for part in parts for name in part.parts)
    how = stored.arrangement if stored.arrangement != "same" else ""
    return Made(stored.shape, names, read, how)
