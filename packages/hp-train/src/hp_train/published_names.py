"""Names of a Hugging Face family for the tensors of hp-train's checkpoints, told to hp-verify."""

from collections.abc import Mapping

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from hp_base.errors import ConfigError
from hp_trainer.config import Config
from hp_trainer.model.transformer import model_tensors
from hp_transformers.families.config import family_of, hf_config
from hp_transformers.families.family import Stacking
from hp_transformers.families.plan import Stored, stored_tensors, to_theirs
from hp_verify.files.made import OTHER, Made
from hp_verify.files.sources import Source


def published(source: Source, found: Mapping[str, Made]) -> dict[str, Made]:
    """Give tensors of a checkpoint of hp-train the names that their Hugging Face family publishes.

    Args:
        source: An open checkpoint, of any format.
        found: Tensors of the checkpoint by their names there.

    Returns:
        Tensors by further names; empty where the checkpoint is of another trainer.
    """
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
        family = family_of(hf_config(model, dtype="float32"))
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
