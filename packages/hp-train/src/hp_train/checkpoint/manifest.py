"""`manifest.json`: what a checkpoint consists of, down to every byte.

Note [Bytes accounted for]. The manifest states which chunk lies where in which file; the header of
each file is a function of the manifest, compared, never parsed; chunks follow each other without a
gap, and a file has exactly the stated size. Header and hashes of the chunks therefore cover every
byte of every file, and the hash of the manifest covers them all.

SHA-256 is in the standard library, anybody can check it with other tools, and one digest of the
manifest stands for the whole checkpoint. It runs at 1.8 GB/s on a core with SHA instructions, every
rank hashing its own part; zlib's crc32 does 4 GB/s but is 32 bits, xxhash 26 GB/s but is one more
compiled dependency, and storage is slower than any of them.
"""

import math
from collections import Counter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from hp_train.checkpoint.extra import decode_extra
from hp_train.checkpoint.tiling import gap_error, tiling_error
from hp_train.folder import DamageError

MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"
MAX_MANIFEST_BYTES = 64 << 20
RESERVED = "__metadata__"  # safetensors keeps this key for itself

DtypeName: TypeAlias = Literal[
    "BF16", "BOOL", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I16", "I32", "I64", "I8", "U8"
]
ITEM_BYTES: dict[DtypeName, int] = {
    "BF16": 2, "BOOL": 1, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "I32": 4, "I64": 8, "I8": 1, "U8": 1,
}  # fmt: skip

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Sizes: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=16)]


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of one tensor, contiguous in one file.

    Attributes:
        file: Index into :attr:`Manifest.files`.
        begin: Where it starts, in bytes after the header of the file.
        offsets: Where it starts in the tensor.
        sizes: Of the box; at least one element.
        sha256: Of its bytes, hexadecimal.
    """

    file: _Count
    begin: _Count
    offsets: _Sizes
    sizes: _Sizes
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor and the chunks that tile it; none if it has no elements."""

    dtype: DtypeName
    shape: _Sizes
    chunks: tuple[Chunk, ...]


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A safetensors file of a checkpoint and its exact size."""

    name: Annotated[str, msgspec.Meta(pattern=r"\Arank-[0-9]{5}\.safetensors\Z")]
    bytes: _Count


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of `manifest.json`.

    Attributes:
        format: Marks the file as ours.
        version: Of this layout.
        save_id: Differs between any two saves; repeated in the header of each file.
        step: Of the training run.
        world_size: Number of ranks that wrote it; information only.
        software: Name and version of what wrote it; information only.
        extra: JSON of the caller; kept as text, since two libraries may spell a number differently.
        files: Those that hold chunks.
        tensors: By global name.
    """

    format: Literal["hp-checkpoint"]
    version: Literal[1]
    save_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    step: _Count
    world_size: _Count
    software: dict[str, str]
    extra: msgspec.Raw
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]


class Part(msgspec.Struct, frozen=True):
    """A chunk with what its tensor says of it."""

    tensor: str
    dtype: DtypeName
    key: str
    chunk: Chunk

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk."""
        return math.prod(self.chunk.sizes) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """One past its last byte, after the header."""
        return self.chunk.begin + self.nbytes


def encode(manifest: Manifest) -> bytes:
    """Return the one spelling of a manifest that :func:`decode` accepts."""
    return msgspec.json.encode(manifest)


def decode(text: bytes) -> Manifest:
    """Read and check a manifest. What it returns can be trusted to describe possible files.

    Raises:
        DamageError: If it is no manifest, describes impossible tensors or files, or is spelled
            otherwise than :func:`encode` does (so that no key can appear twice).
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise DamageError(
            f"{MANIFEST} ({len(text)} bytes) must not exceed {MAX_MANIFEST_BYTES} bytes"
        )
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        canonical = encode(manifest) == text
        decode_extra(bytes(manifest.extra))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamageError(f"{MANIFEST} is not a manifest: {error}") from None
    if not canonical:
        raise DamageError(f"{MANIFEST} is not spelled as it was written")
    _check_tensors(manifest)
    _check_files(manifest)
    return manifest


def key_of(tensor: str, shape: tuple[int, ...], chunk: Chunk) -> str:
    """Key of a chunk in its file: the tensor's name, and its offsets where it is not all of it."""
    if chunk.sizes == shape:
        return tensor
    return f"{tensor}@{','.join(map(str, chunk.offsets))}"


def parts_of(manifest: Manifest) -> list[Part]:
    """All chunks in the order of their bytes: by file, then by position."""
    parts = [
        Part(name, tensor.dtype, key_of(name, tensor.shape, chunk), chunk)
        for name, tensor in manifest.tensors.items()
        for chunk in tensor.chunks
    ]
    return sorted(parts, key=lambda part: (part.chunk.file, part.chunk.begin))


def file_header(save_id: str, step: int, parts: list[Part]) -> bytes:
    """Length and JSON that a safetensors file with these chunks starts with."""
    entries: dict[str, Any] = {RESERVED: {"format": "pt", "save_id": save_id, "step": str(step)}}
    for part in parts:
        span = [part.chunk.begin, part.end]
        entries[part.key] = {
            "dtype": part.dtype,
            "shape": part.chunk.sizes,
            "data_offsets": span,
        }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text


def name_error(name: str) -> str | None:
    """Say why a tensor cannot be saved under this name; None if it can."""
    if not 0 < len(name) <= 512 or not name.isprintable() or name == RESERVED:
        shown = repr(name[:60])
        return f"name {shown} must be printable, of 1 to 512 characters and not {RESERVED}"
    return None


def _check_tensors(manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        if error := name_error(name):
            raise DamageError(f"{MANIFEST}: {error}")
        boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
        if error := tiling_error(tensor.shape, boxes):
            raise DamageError(f"{MANIFEST}: tensor {name}: {error}")


def _check_files(manifest: Manifest) -> None:
    names = Counter(file.name for file in manifest.files)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise DamageError(f"{MANIFEST}: file {repeated[0]} must be listed once")
    by_file: list[list[Part]] = [[] for _ in manifest.files]
    for part in parts_of(manifest):
        if part.chunk.file >= len(by_file):
            raise DamageError(
                f"{MANIFEST}: tensor {part.tensor}: file ({part.chunk.file}) must be less than "
                f"the number of files ({len(by_file)})"
            )
        by_file[part.chunk.file].append(part)
    for file, parts in zip(manifest.files, by_file, strict=True):
        if error := _file_error(manifest, file, parts):
            raise DamageError(f"{MANIFEST}: file {file.name}: {error}")


def _file_error(manifest: Manifest, file: SavedFile, parts: list[Part]) -> str | None:
    if not parts:
        return "must hold a chunk"
    keys = Counter(part.key for part in parts)
    if repeated := [key for key, count in keys.items() if count > 1]:
        return f"key {repeated[0]} must appear once"
    if error := gap_error([(part.chunk.begin, part.end) for part in parts]):
        return error
    size = len(file_header(manifest.save_id, manifest.step, parts)) + parts[-1].end
    if size != file.bytes:
        return f"bytes ({file.bytes}) must equal those of header and chunks ({size})"
    return None
