"""Weights of a Hugging Face model into the tensors that a rank has, and nothing else.

Every rank reads the slices of its own tensors straight from the files.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError, ConfigError
from hp_checkpoint import Box, Part
from hp_checkpoint.safetensors import FileTensor, opened_tensors
from hp_checkpoint.weight_files import first_of, weight_files
from hp_trainer.config import ModelConfig
from hp_trainer.model.parameters import Declared
from hp_trainer.model.transformer import model_shapes, model_tensors
from hp_transformers.families.config import family_of, model_config, read_config
from hp_transformers.families.copies import is_beside, require_copies
from hp_transformers.families.files import on_all_ranks
from hp_transformers.families.plan import (
    Stored,
    stacking_of,
    stored_tensors,
    theirs_of,
    to_ours,
)

FLOATS = ("BF16", "F16", "F32", "F64")
# Suffixes of tensors that quantised formats have beside or instead of weights.
_QUANTISED = ("_blocks", "_scales", "weight_scale_inv", "weight_scale", "qweight", "qzeros")


_Read = tuple[Tensor, Stored, int, Box]
"""A view of a tensor of ours, and the stored tensor, part of it and box in a file that fill it."""


def load_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Fill tensors in place from the files of a folder.

    Values are cast to the dtype of the tensors. A DTensor takes its part, however it is sharded.

    Args:
        folder: Folder with `config.json` and safetensors files.
        tensors: Parameters and buffers of routers of this rank, by global name.
        group: CPU group of the ranks that call together; None: this rank is alone.

    Raises:
        hp_base.errors.ConfigError: On every rank and before any tensor is filled: the folder has
            no model that can be read, or a model with other tensors.
        hp_platform.PeerError: When another rank failed for another reason.
    """
    with ExitStack() as stack:

        def prepare() -> tuple[dict[str, FileTensor], list[_Read]]:
            files = stack.enter_context(opened_files(folder))
            share = (0, 1) if group is None else (group.rank(), group.size())
            return files, list(_reads(tensors, files, folder, share=share))

        def read() -> None:
            for target, stored, part, box in reads:
                values = to_ours(stored, part, files[stored.name].read(box))
                target.copy_(values.view(target.shape))

        files, reads = on_all_ranks(prepare, group=group, where="find the weights to load")
        with torch.no_grad():
            on_all_ranks(read, group=group, where="load weights")


def check_weights(folder: Path) -> int:
    """Check that a folder has all tensors of a model and no others.

    Only weights that files have twice are read, and compared.

    Returns:
        Number of parameters.

    Raises:
        hp_base.errors.ConfigError: About the first thing that is wrong.
    """
    with opened_files(folder) as files:
        ours, _ = _checked(files, folder)
    return sum(torch.Size(tensor.shape).numel() for tensor in ours.values())


def require_fit(folder: Path, model: ModelConfig, vocab_size: int) -> None:
    """Refuse weights that do not fit a model, by the headers of their files.

    Args:
        folder: Folder with `config.json` and safetensors files.
        model: Model that is to take them.
        vocab_size: Rows of its embedding.

    Raises:
        hp_base.errors.ConfigError: When `load_weights` would raise it.
    """
    ours = model_shapes(replace(model, vocab_size=vocab_size))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in ours.items()}
    with opened_files(folder) as files:
        for _ in _reads(tensors, files, folder, share=(0, 1)):
            pass


@contextmanager
def opened_files(folder: Path) -> Iterator[dict[str, FileTensor]]:
    """Open the files of a model and yield their tensors by name; only headers are read.

    Raises:
        ConfigError: When files are missing, damaged, become shorter, or not what the index says.
    """
    try:
        with opened_tensors(weight_files(folder)) as files:
            yield files
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _reads(
    tensors: Mapping[str, Tensor],
    files: Mapping[str, FileTensor],
    folder: Path,
    *,
    share: tuple[int, int],
) -> Iterator[_Read]:
    ours, listed = _checked(files, folder, share=share)
    of_part: dict[str, list[tuple[Stored, int]]] = {}
    for stored in listed:
        if not stored.is_copy:
            for number, part in enumerate(stored.parts):
                of_part.setdefault(part, []).append((stored, number))
    for name, tensor in tensors.items():
        if name not in ours or tuple(tensor.shape) != ours[name].shape:
            has = f"must have shape {list(ours[name].shape)}" if name in ours else "must be absent"
            raise ConfigError(
                f"tensor {name} ({list(tensor.shape)}) {has}: [model] must be what hp import-hf "
                f'prints for "{folder}"'
            )
        here = Part.of(tensor)
        offsets, sizes = here.box
        for stored, number in of_part[name]:
            if stored.expert is None:
                yield here.local, stored, number, theirs_of(stored, number, here.box)
            elif offsets[0] <= stored.expert < offsets[0] + sizes[0]:
                row = here.local[stored.expert - offsets[0]]
                yield row, stored, number, Box(offsets[1:], sizes[1:])


def _checked(
    files: Mapping[str, FileTensor], folder: Path, *, share: tuple[int, int] = (0, 1)
) -> tuple[Mapping[str, Declared], list[Stored]]:
    """Check the files of a folder; return our tensors of its model, and the stored ones."""
    values = read_config(folder)
    model, family = model_config(values), family_of(values)
    ours = model_tensors(model)
    listed = stored_tensors(ours, model, family, stacking=stacking_of(files, family))
    _check(files, listed, model)
    require_copies(files, listed, model, share=share)
    return ours, listed


def _check(files: Mapping[str, FileTensor], listed: list[Stored], model: ModelConfig) -> None:
    """Refuse files that lack a tensor, have an unknown tensor, or one that cannot be read."""
    for name, entry in files.items():
        if name.endswith(_QUANTISED) or entry.dtype not in FLOATS:
            raise ConfigError(
                f"tensor {name} ({entry.dtype}) must be one of {', '.join(FLOATS)}: quantised "
                "weights are not read"
            )
    wanted = {stored.name: stored for stored in listed}
    if missing := [s.name for s in listed if not s.is_copy and s.name not in files]:
        raise ConfigError(
            f"files of the model must have {first_of(missing)}{_without_prediction(files, model)}"
        )
    if others := [n for n in files if n not in wanted and not is_beside(n, model)]:
        raise ConfigError(f"files of the model must not have {first_of(others)}")
    for name, stored in wanted.items():
        if name in files and files[name].shape != tuple(stored.shape):
            raise ConfigError(
                f"tensor {name} ({list(files[name].shape)}) must be of shape {list(stored.shape)}"
            )


def _without_prediction(files: Mapping[str, FileTensor], model: ModelConfig) -> str:
    """Return a remedy where only modules of prediction are missing, which transformers drops."""
    layers = {name.split(".")[2] for name in files if name.startswith("model.layers.")}
    if not model.num_mtp_modules or str(model.num_layers) in layers:
        return ""
    return (
        f": make num_nextn_predict_layers ({model.num_mtp_modules}) 0 in config.json, as the files "
        f"have no layer {model.num_layers}"
    )
