"""Tensors of files beside the weights of a model, compared with what the model has in their place.

The output matrix of a tied model, embeddings that modules of prediction repeat, and frequencies of
rotary embedding are in files of some age and not in others. None is dropped by its name alone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from hp_base.errors import ConfigError
from hp_checkpoint import Box
from hp_checkpoint.safetensors import FileTensor
from hp_trainer.config import ModelConfig
from hp_trainer.model.rotary import inverse_frequencies
from hp_transformers.families.plan import Stored

FREQUENCIES = "rotary_emb.inv_freq"
"""How the names of frequencies end that old files have of every layer."""
TIED = "tie_word_embeddings (true) in config.json says so; make it false there to keep both"
"""Why a matrix must be the embedding, and what to do otherwise."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PIECE_BYTES = 1 << 25  # of a tensor, that is read at once
_ROUNDING = 2.0**-7  # of frequencies that were in bfloat16 at some time


def is_beside(name: str, model: ModelConfig) -> bool:
    """Tell whether a name is of what files may have beside weights, if it is what the model has."""
    return name.endswith(FREQUENCIES) or (model.tie_embeddings and name == _HEAD)


def require_copies(
    files: Mapping[str, FileTensor],
    listed: Sequence[Stored],
    model: ModelConfig,
    *,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Refuse files in which a tensor that is not read differs from what takes its place.

    Args:
        files: Tensors of the files; they have all that are listed but copies.
        listed: What files of the model have.
        model: Its configuration.
        share: Which part of the rows is compared here, and of how many: ranks share them.

    Raises:
        ConfigError: About the first that differs.
    """
    for name, original, remedy in _copies(files, listed, model):
        if not are_equal(files[name], files[original], share=share):
            raise ConfigError(f"tensor {name} must equal {original}: {remedy}")
    for name in (n for n in files if n.endswith(FREQUENCIES)):
        require_frequencies(name, files[name], [inverse_frequencies(model)])


def require_frequencies(name: str, file: FileTensor, expected: Collection[Tensor]) -> None:
    """Refuse frequencies of rotary embedding in files that are none of those of the model.

    Raises:
        ConfigError: When they are not, up to the rounding of bfloat16.
    """
    values = whole(file).double()
    alike = (e.double() for e in expected if e.shape == values.shape)
    if not any(bool(((values - e).abs() <= _ROUNDING * e.abs()).all()) for e in alike):
        raise ConfigError(
            f"tensor {name} must be what config.json says of rotary embedding: correct it there, "
            "or take the tensor out of the files"
        )


def are_equal(one: FileTensor, other: FileTensor, *, share: tuple[int, int] = (0, 1)) -> bool:
    """Tell whether two tensors of files have the same values, in a part of their rows.

    Args:
        one: Any tensor.
        other: Any tensor.
        share: Which part of the rows, and of how many.
    """
    if one.shape != other.shape:
        return False
    return all(torch.equal(*_widened(one.read(b), other.read(b))) for b in _pieces(one, share))


def whole(file: FileTensor) -> Tensor:
    """All values of a tensor of a file."""
    return file.read(Box((0,) * len(file.shape), file.shape))


def _widened(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def _pieces(file: FileTensor, share: tuple[int, int]) -> Iterator[Box]:
    """Boxes of whole rows that together are a share of a tensor."""
    if not file.shape:
        yield Box((), ())
        return
    (index, count), (rows, *rest) = share, file.shape
    step = max(1, _PIECE_BYTES // (8 * max(1, prod(rest))))
    end = rows * (index + 1) // count
    for begin in range(rows * index // count, end, step):
        yield Box((begin, *(0 for _ in rest)), (min(step, end - begin), *rest))


def _copies(
    files: Mapping[str, FileTensor], listed: Sequence[Stored], model: ModelConfig
) -> Iterator[tuple[str, str, str]]:
    """Tensors that are not read, those that take their places, and what to do if they differ."""
    if model.tie_embeddings and _HEAD in files:
        yield _HEAD, _EMBEDDING, TIED
    originals = {stored.parts: stored.name for stored in listed if not stored.is_copy}
    for stored in listed:
        if stored.is_copy and stored.name in files:
            yield (
                stored.name,
                originals[stored.parts],
                "a module of prediction has no matrix of its own here; take it out of the files",
            )
