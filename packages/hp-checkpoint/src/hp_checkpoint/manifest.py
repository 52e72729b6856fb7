"""`manifest.json`: the description of every byte of a checkpoint.

The manifest has the file and place of each chunk. The header of each file follows from the manifest
and is compared instead of parsed; chunks follow each other without a gap, and a file has exactly
the stated size. So headers and hashes of the chunks cover every byte of every file, and the hash of
the manifest covers all of them.

SHA-256 is in the standard library, other tools can check it, and one digest of the manifest stands
for the whole checkpoint. It runs at 1.8 GB/s on a core with SHA instructions, and every rank hashes
its own part. zlib's crc32 runs at 4 GB/s but has 32 bits, xxhash at 26 GB/s but is one more
compiled dependency, and storage is slower than any of them.

The manifest is parsed by the standard library's JSON and checked like messages between ranks, since
this package depends on torch alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch

from hp_base.folder import DamageError
from hp_checkpoint.boxes import Box, coverage_error, gap_error
from hp_checkpoint.json_file import decode_extra
from hp_platform.failures.messages import as_form

MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"
MAX_MANIFEST_BYTES = 64 << 20
RESERVED = "__metadata__"  # safetensors keeps this key for itself

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Safetensors' name of every dtype that can be saved, and torch's."""
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

_FORMAT, _VERSION = "hp-checkpoint", 1
_LARGEST = 1 << 53
_MOST_DIMS = 16
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Chunk(NamedTuple):
    """A box of one tensor, contiguous in one file.

    Attributes:
        file: Index into :attr:`Manifest.files`.
        begin: First byte, counted after the header of the file.
        offsets: First index of the box in each dimension of the tensor.
        sizes: Size of the box in each dimension; at least one element.
        sha256: SHA-256 of its bytes, hexadecimal.
    """

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sha256: str

    @property
    def box(self) -> Box:
        """Return the offsets and sizes."""
        return Box(self.offsets, self.sizes)


class SavedTensor(NamedTuple):
    """A whole tensor and the chunks that cover it; none if it has no elements."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class SavedFile(NamedTuple):
    """A safetensors file of a checkpoint and its exact size."""

    name: str
    bytes: int


class Entry(NamedTuple):
    """A chunk with properties of its tensor.

    Attributes:
        tensor: Name of the tensor.
        dtype: Dtype of the tensor, a key of `DTYPES` such as `"BF16"`.
        key: Key of the chunk in its file.
        chunk: Place and hash of the chunk.
        nbytes: Number of bytes of the chunk.
    """

    tensor: str
    dtype: str
    key: str
    chunk: Chunk
    nbytes: int

    @classmethod
    def of(cls, tensor: str, dtype: str, shape: tuple[int, ...], chunk: Chunk) -> Entry:
        """Return the entry of a chunk; its key has offsets unless it is the whole tensor."""
        is_whole = chunk.sizes == shape
        key = tensor if is_whole else f"{tensor}@{','.join(map(str, chunk.offsets))}"
        return cls(tensor, dtype, key, chunk, math.prod(chunk.sizes) * DTYPES[dtype].itemsize)


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        save_id: Unique id of the save; repeated in the header of each file.
        step: Step of the training run.
        world_size: Number of ranks that wrote it; information only.
        software: Names and versions of the software that wrote it; information only.
        extra: JSON of the caller, as text.
        files: Files with chunks.
        tensors: Whole tensors and their chunks, by global name.
    """

    save_id: str
    step: int
    world_size: int
    software: dict[str, str]
    extra: bytes
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]

    @cached_property
    def entries(self) -> list[list[Entry]]:
        """Return all chunks, by file, in the order of their bytes."""
        entries: list[list[Entry]] = [[] for _ in self.files]
        for name, (dtype, shape, chunks) in self.tensors.items():
            for chunk in chunks:
                entries[chunk.file].append(Entry.of(name, dtype, shape, chunk))
        return [sorted(of_file, key=attrgetter("chunk.begin")) for of_file in entries]

    @cached_property
    def headers(self) -> list[bytes]:
        """Return the header of each file."""
        return [file_header(self.save_id, self.step, entries) for entries in self.entries]


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest, the only one that :func:`decode` accepts."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "save_id": manifest.save_id,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "software": manifest.software,
    }
    tensors = {
        name: {"dtype": dtype, "shape": shape, "chunks": [chunk._asdict() for chunk in chunks]}
        for name, (dtype, shape, chunks) in manifest.tensors.items()
    }
    tail = {"files": [file._asdict() for file in manifest.files], "tensors": tensors}
    return _json(head)[:-1] + b',"extra":' + manifest.extra + b"," + _json(tail)[1:]


class _Stated(NamedTuple):
    """The fields of the file without `extra`, whose length is checked before it is parsed."""

    format: str
    version: int
    save_id: str
    step: int
    world_size: int
    software: dict[str, str]
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]


def decode(text: bytes) -> Manifest:
    """Decode and check a manifest, so that its files and tensors are possible.

    Raises:
        DamageError: If the text is not a manifest, describes impossible tensors or files, or
            differs from the text of :func:`encode`.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise DamageError(
            f"{MANIFEST} ({len(text)} bytes) must not exceed {MAX_MANIFEST_BYTES} bytes"
        )
    # Names cannot contain these texts, as their quotes are escaped; nor can the rest of the file.
    first, last = text.find(b',"extra":'), text.rfind(b',"files":[')
    extra = text[first + len(b',"extra":') : last]
    try:
        decode_extra(extra)
        # A text with a key twice differs from the text of `encode`.
        stated: _Stated = as_form(_Stated, json.loads(text[:first] + text[last:]))
        head = stated.save_id, stated.step, stated.world_size, stated.software
        manifest = Manifest(*head, extra, stated.files, stated.tensors)
        canonical = encode(manifest) == text
    except (ValueError, RecursionError) as error:
        shown = " ".join(str(error).split())[:300]
        raise DamageError(f"{MANIFEST} is not a manifest: {shown}") from None
    if not canonical or stated.format != _FORMAT or stated.version != _VERSION:
        raise DamageError(f"{MANIFEST} is not spelled as it was written in format {_VERSION}")
    _check_numbers(manifest)
    _check_tensors(manifest)
    _check_files(manifest)
    return manifest


def file_header(save_id: str, step: int, entries: list[Entry]) -> bytes:
    """Return the header of a safetensors file with these chunks: its length and JSON."""
    header: dict[str, object] = {RESERVED: {"format": "pt", "save_id": save_id, "step": str(step)}}
    for _, dtype, key, chunk, nbytes in entries:
        span = [chunk.begin, chunk.begin + nbytes]
        header[key] = {"dtype": dtype, "shape": chunk.sizes, "data_offsets": span}
    return framed(header)


def framed(header: Mapping[str, object]) -> bytes:
    """Return the length and JSON of a safetensors header, padded so that the data are aligned."""
    text = _json(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def digest_line(manifest: bytes) -> bytes:
    """Return the line of `manifest.sha256`, for `sha256sum --check`."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def unfit_name(names: Collection[str]) -> tuple[str, str] | None:
    """Return a name under which no tensor can be saved, and the reason; None if there is none."""
    for name in names:
        if not 0 < len(name) <= 512 or not name.isprintable() or name == RESERVED:
            limits = f"printable, of 1 to 512 characters and not {RESERVED}"
            return name, f"name {name[:60]!r} must be {limits}"
    return None


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _check_numbers(manifest: Manifest) -> None:
    """Check sizes, places, dtypes, names and hashes of tensors and files, each on its own."""
    chunks = [chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    lists = [tensor.shape for tensor in manifest.tensors.values()]
    lists += [sizes for chunk in chunks for sizes in (chunk.offsets, chunk.sizes)]
    if max(map(len, lists), default=0) > _MOST_DIMS:
        raise DamageError(f"{MANIFEST}: sizes must be at most {_MOST_DIMS} numbers")
    numbers = [manifest.step, manifest.world_size, *chain(*lists)]
    numbers += [number for chunk in chunks for number in chunk[:2]]
    numbers += [file.bytes for file in manifest.files]
    if min(numbers) < 0 or max(numbers) > _LARGEST:
        raise DamageError(f"{MANIFEST}: sizes and places must be numbers from 0 to {_LARGEST}")
    if unknown := {tensor.dtype for tensor in manifest.tensors.values()} - DTYPES.keys():
        raise DamageError(
            f"{MANIFEST}: dtype {min(unknown)[:60]!r} must be one of {', '.join(DTYPES)}"
        )
    names, hashes = [file.name for file in manifest.files], [chunk.sha256 for chunk in chunks]
    for texts, pattern in ([manifest.save_id], _SAVE_ID), (names, _FILE), (hashes, _SHA256):
        for text in texts:
            if not pattern.fullmatch(text):
                raise DamageError(
                    f"{MANIFEST}: {text[:80]!r} must be of the form {pattern.pattern}"
                )


def _check_tensors(manifest: Manifest) -> None:
    if bad := unfit_name(manifest.tensors):
        raise DamageError(f"{MANIFEST}: {bad[1]}")
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file >= len(manifest.files):
                raise DamageError(
                    f"{MANIFEST}: tensor {name}: file ({chunk.file}) must be less than the number "
                    f"of files ({len(manifest.files)})"
                )
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
        if error := coverage_error(tensor.shape, boxes):
            raise DamageError(f"{MANIFEST}: tensor {name}: {error}")


def _check_files(manifest: Manifest) -> None:
    names = Counter(file.name for file in manifest.files)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise DamageError(f"{MANIFEST}: file {repeated[0]} must be listed once")
    for number, file in enumerate(manifest.files):
        if error := _file_error(manifest, number):
            raise DamageError(f"{MANIFEST}: file {file.name}: {error}")


def _file_error(manifest: Manifest, number: int) -> str | None:
    entries, stated = manifest.entries[number], manifest.files[number].bytes
    if not entries:
        return "must hold a chunk"
    keys = Counter([entry.key for entry in entries])
    if repeated := [key for key, count in keys.items() if count > 1]:
        return f"key {repeated[0]} must appear once"
    spans = [(entry.chunk.begin, entry.chunk.begin + entry.nbytes) for entry in entries]
    if error := gap_error(spans):
        return error
    size = len(manifest.headers[number]) + spans[-1][1]
    if size != stated:
        return f"bytes ({stated}) must equal those of header and chunks ({size})"
    return None
