"""Verification: every byte of a checkpoint against its manifest, before anybody uses one."""

import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from hp_train.checkpoint.directory import parse_step_name
from hp_train.checkpoint.files import PIECE_BYTES, hash_span
from hp_train.checkpoint.manifest import (
    DIGEST,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    decode,
    file_header,
    parts_of,
)
from hp_train.errors import CheckpointError
from hp_train.folder import DamageError, opened, opened_directory, read_into, read_whole


def verify_checkpoint(path: Path) -> None:
    """Check every byte of one checkpoint, without ranks.

    Args:
        path: Of the checkpoint itself, such as `checkpoints/step-00000010`.

    Raises:
        CheckpointError: In one line, naming the file and the tensor, if it is damaged; if it
            cannot be read.
    """
    try:
        manifest = read_manifest(path)
        verify_parts(path, manifest, parts_of(manifest))
    except DamageError as damage:
        raise CheckpointError(f"{path}: {damage}") from None
    except OSError as error:
        raise failed("read", path, error) from None


def digest_line(manifest: bytes) -> bytes:
    """What `manifest.sha256` holds; `sha256sum --check` understands it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; its files are not opened.

    Raises:
        DamageError: If it is missing, not what was written, or belongs to another step.
        OSError: If this process cannot read it, which says nothing of the checkpoint.
    """
    try:
        with opened_directory(path) as directory:
            digest = read_whole(directory, DIGEST, limit=1024)
            text = read_whole(directory, MANIFEST, limit=MAX_MANIFEST_BYTES)
    except OSError as error:
        raise _damage_or(error, MANIFEST) from None
    if digest != digest_line(text):
        raise DamageError(f"{MANIFEST} does not match {DIGEST}")
    manifest = decode(text)
    named = parse_step_name(path.name)
    if named is not None and named[0] != manifest.step:
        raise DamageError(
            f"{MANIFEST}: step ({manifest.step}) must equal that of the name ({named[0]})"
        )
    return manifest


def failed(verb: str, path: Path, error: OSError) -> CheckpointError:
    """One line for an error of the storage."""
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error}")


def share_of(parts: Sequence[Part], *, rank: int, world_size: int) -> list[Part]:
    """Consecutive parts for one rank to check: all ranks get about as many bytes."""
    total = sum(part.nbytes for part in parts)
    mine, before = [], 0
    for part in parts:
        middle = before + part.nbytes // 2
        if middle * world_size // total == rank:
            mine.append(part)
        before += part.nbytes
    return mine


def verify_parts(
    path: Path,
    manifest: Manifest,
    parts: Sequence[Part],
    *,
    on_part: Callable[[], None] = lambda: None,
) -> None:
    """Check chunks, and size and header of the files they are in.

    Args:
        path: Of the checkpoint.
        manifest: Of it, decoded.
        parts: Some of its chunks, in the order of :func:`parts_of`.
        on_part: Called before each of them.

    Raises:
        DamageError: Naming the file, and the tensor if the damage is in one.
        OSError: If this process cannot read it, which says nothing of the checkpoint.
    """
    everything = {
        file: list(group) for file, group in groupby(parts_of(manifest), lambda p: p.chunk.file)
    }
    buffer = memoryview(bytearray(PIECE_BYTES))
    with opened_directory(path) as directory:
        for file, group in groupby(parts, lambda part: part.chunk.file):
            name = manifest.files[file].name
            header = file_header(manifest.save_id, manifest.step, everything[file])
            try:
                with opened(directory, name) as descriptor:
                    _check_header(descriptor, name, header, manifest.files[file].bytes)
                    for part in group:
                        on_part()
                        _check_chunk(descriptor, name, len(header), part, buffer)
            except OSError as error:
                raise _damage_or(error, name) from None


def _check_header(descriptor: int, name: str, header: bytes, nbytes: int) -> None:
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        raise DamageError(f"{name}: size ({size} bytes) must equal {nbytes} bytes")
    found = bytearray(len(header))
    read_into(descriptor, memoryview(found))
    if found != header:
        raise DamageError(f"{name}: the header is damaged or of another save")


def _check_chunk(descriptor: int, name: str, start: int, part: Part, buffer: memoryview) -> None:
    begin = start + part.chunk.begin
    found = hash_span(descriptor, begin=begin, nbytes=part.nbytes, buffer=buffer)
    if found != part.chunk.sha256:
        raise DamageError(f"{name}: tensor {part.key} is damaged (its SHA-256 differs)")


def _damage_or(error: OSError, name: str) -> Exception:
    """An error of the medium is damage; one of permissions or of this process is not."""
    if error.errno == errno.EIO:
        return DamageError(f"{name}: {error.strerror}")
    return error
