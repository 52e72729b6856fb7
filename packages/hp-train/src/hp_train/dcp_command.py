"""`hp import-dcp` and `hp export-dcp`."""

import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import DamageError, Folder, opened_directory, read_whole
from hp_checkpoint import open_checkpoint
from hp_checkpoint.boxes import Box
from hp_checkpoint.checkpoint import reading
from hp_checkpoint.dcp import read_sources, sources_in, write_sources
from hp_checkpoint.files import failed
from hp_checkpoint.json_file import MAX_EXTRA_BYTES, decode_extra, encode_extra
from hp_checkpoint.runs.directory import newest_checkpoint
from hp_checkpoint.runs.save import save_step
from hp_checkpoint.save import Source
from hp_trainer.config import Config, rules
from hp_trainer.config.options import Resolved
from hp_trainer.config.schema import fields
from hp_trainer.launch.rundir import write_config

EXTRA = "extra.json"
"""Beside `.metadata`: step, position of the data and config. torch does not look at it."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def export_dcp(run: Path, folder: Path, *, step: int | None) -> int:
    """Write a checkpoint as one that `torch.distributed.checkpoint.load` reads.

    One chunk of the checkpoint is in memory at a time, and is compared with its hash.

    Args:
        run: Run directory.
        folder: Folder to be made.
        step: Step of the checkpoint; None: the newest.

    Returns:
        Exit status.

    Raises:
        ConfigError: When there is no such run, or `folder` is in use.
        CheckpointError: When the checkpoint is missing or damaged, or a file cannot be written.
    """
    rules.require_run_directory(str(run))
    path = newest_checkpoint(run / "checkpoints", step=step)
    checkpoint = open_checkpoint(path)
    _make_new(folder)
    try:
        write_sources(sources_in(checkpoint), FileSystemWriter(folder, single_file_per_rank=True))
        (folder / EXTRA).write_bytes(checkpoint.manifest.extra)
    except OSError as error:
        raise failed("write", folder, error) from None
    sys.stdout.write(f"wrote {folder} from {path}\n")
    return 0


def import_dcp(folder: Path, run: Path, *, resolved: Resolved | None, step: int | None) -> int:
    """Make a run directory that goes on from a plain checkpoint of torch.

    Args:
        folder: Folder with `.metadata` and `.distcp` files. Tensors are called as in a checkpoint
            of `hp train`; without any of ``optimizer.``, Adam starts anew.
        run: Run directory, to be made.
        resolved: Config of the run; None: what `extra.json` says.
        step: Number of steps that the weights have been trained; None: what `extra.json` says, else
            0.

    Returns:
        Exit status.

    Raises:
        ConfigError: When there is no config, or `run` is there.
        CheckpointError: When the checkpoint is hostile or damaged, or a file cannot be written.
    """
    sources, left_out = read_sources(folder)
    with reading(folder):
        extra = _extra(folder)
    config = _resolved(folder, resolved, extra)
    if not any(name.startswith("optimizer.") for name in sources):
        sources |= _new_moments(sources)
        extra = {"is_new": True} | {k: v for k, v in extra.items() if k == "config"}
    extra = _position(folder, extra, step)
    _make_new(run)
    try:
        with Folder.open(run) as made:
            write_config(made, config)
        save_step(
            run / "checkpoints",
            lambda: sources,
            step=extra["step"],
            extra=encode_extra(extra),
            group=None,
            keep=1,
        )
    except OSError as error:
        raise failed("write", run, error) from None
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    for name in left_out:
        sys.stdout.write(f"left out {name}: not a tensor, and pickled\n")
    sys.stdout.write(f"wrote {run}, step {extra['step']}; go on with: hp train --resume {run}\n")
    return 0


def _new_moments(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return zeros beside every weight: what Adam starts with."""
    moments = {}
    for name, source in sources.items():
        if not name.startswith("model.") or name.endswith(".correction_bias"):
            continue
        zeros = Source(source.dtype, source.shape, source.boxes, partial(_zeros, source))
        for moment in _MOMENTS:
            moments[f"optimizer.{moment}.{name.removeprefix('model.')}"] = zeros
    return moments


def _zeros(source: Source, box: Box) -> Tensor:
    return torch.zeros(box[1], dtype=source.dtype)


def _extra(folder: Path) -> dict[str, Any]:
    with opened_directory(folder) as directory:
        if not os.path.lexists(folder / EXTRA):
            return {}
        text = read_whole(directory, EXTRA, limit=MAX_EXTRA_BYTES)
    try:
        return decode_extra(text)
    except ValueError as error:
        raise DamageError(f"{EXTRA}: {error}") from None


def _resolved(folder: Path, resolved: Resolved | None, extra: Mapping[str, Any]) -> Resolved:
    """Return the config that was given, else the one that was saved."""
    if resolved is not None:
        return resolved
    if "config" not in extra:
        raise ConfigError(f"CONFIG must be given where {folder} has no {EXTRA} with one")
    try:
        config = msgspec.convert(extra["config"], Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder}/{EXTRA}: config: {error}") from None
    rules.check(config)
    return Resolved(config, dict.fromkeys(fields(), EXTRA), "imported")


def _position(folder: Path, extra: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return the state to resume from, see `hp_trainer.training.trainer`; unknown counts are 0.

    Adam that starts anew has done no updates, as if all steps had been skipped.
    """
    known = {key: value for key, value in extra.items() if key != "is_new"}
    if step is not None:
        known["step"] = step
    for key in ("step", "next_sequence", "skipped", "skipped_in_a_row"):
        known.setdefault(key, 0)
        if type(known[key]) is not int or not 0 <= known[key] < 1 << 53:
            raise CheckpointError(f"{folder}/{EXTRA}: {key} must be a number from 0 on")
    if "is_new" in extra:
        known["skipped"] = known["step"]
    known.setdefault("data", None)
    return known


def _make_new(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f'"{folder}" must be a new folder: {error.strerror}') from None
