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
"""Suffix of the names of frequencies, which old files have for every layer."""
TIED = "tie_word_embeddings (true) in config.json says so; make it false there to keep both"
"""Reason why a matrix must equal the embedding, and remedy if it does not."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PIECE_BYTES = 1 << 25  # of a tensor, read at once
_ROUNDING = 2.0**-7  # relative, of frequencies that were in bfloat16 at some time


def is_beside(name: str, model: ModelConfig) -> bool:
    """Tell whether files may have a tensor of this name beside weights, if its values are right."""
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
        listed: Tensors that files of the model have.
        model: Configuration of the model.
        share: Index and number of the parts of the rows, of which this rank compares one.

    Raises:
        ConfigError: About the first that differs.
    """
    for name, original, remedy in _copies(files, listed, model):
        if not are_equal(files[name], files[original], share=share):
            raise ConfigError(f"tensor {name} must equal {original}: {remedy}")
    for name in (n for n in files if n.endswith(FREQUENCIES)):
        require_frequencies(name, files[name], [inverse_frequencies(model)])


def require_frequencies(name: str, file: FileTensor, expected: Collection[Tensor]) -> None:
    """Refuse frequencies of rotary embedding in files that differ from those of the model.

    Args:
        name: Name of the tensor.
        file: Tensor of the file.
        expected: Frequencies of the model, of each of its kinds of layers.

    Raises:
        ConfigError: When they differ from all by more than the rounding of bfloat16.
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
        one: First tensor.
        other: Second tensor.
        share: Index and number of the parts of the rows, of which one is compared.
    """
    if one.shape != other.shape:
        return False
    return all(torch.equal(*_widened(one.read(b), other.read(b))) for b in _pieces(one, share))


def whole(file: FileTensor) -> Tensor:
    """Read all values of a tensor of a file."""
    return file.read(Box((0,) * len(file.shape), file.shape))


def _widened(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def _pieces(file: FileTensor, share: tuple[int, int]) -> Iterator[Box]:
    """Yield boxes of whole rows that together are a share of a tensor."""
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
    """Yield each tensor that repeats another: both names, and the remedy if they differ."""
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
