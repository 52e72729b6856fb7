"""The index of a folder of tokens, ``index.json``, with types and bounds of all fields."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hp_base.atomic_write import replace_file
from hp_base.errors import ConfigError, DataError
from hp_base.folder import DamageError, opened_directory, read_whole
from hp_data.corpus import printable
from hp_data.tokenizer import Tokenizer

INDEX = "index.json"

_INDEX_BYTES = 1 << 16
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Size = Annotated[int, Meta(ge=1, le=2**48)]
_Id = Annotated[int, Meta(ge=0, lt=2**32)]
_DType = Literal["uint8", "uint16", "uint32"]


class Split(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of tokens.

    Attributes:
        tokens: Number of tokens.
        digest: Digest of the number of tokens, their dtype and the digests of all chunks.
    """

    tokens: _Size
    digest: _Digest


class Index(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of the tokens of a folder.

    Attributes:
        format: Version of the folder's format.
        dtype: Dtype of the ids.
        vocab_size: One more than the largest possible id.
        separator: Id that ends a document.
        tokenizer: Identity of the tokenizer.
        eval_fraction: Share to hold out, as configured.
        source: Digest of the whole text.
        train: Training tokens.
        eval: Held-out tokens.
        seal: Digest of all other fields; see `sealed`.
    """

    format: Literal[2] = 2
    dtype: _DType
    vocab_size: _Size
    separator: _Id
    tokenizer: str
    eval_fraction: float
    source: _Digest
    train: Split
    eval: Split
    seal: str = ""


def read_index(folder: Path) -> Index:
    """Return the index of a folder, with every field of the right type and in its bounds.

    Raises:
        DataError: If there is no such index.
    """
    try:
        with opened_directory(folder) as directory:
            text = read_whole(directory, INDEX, limit=_INDEX_BYTES)
        return _decoded(text)
    except DamageError as error:
        raise DataError(f"{printable(folder)}: {printable(str(error))}") from None
    except OSError as error:
        raise DataError(f"{printable(folder)}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        path = printable(folder / INDEX)
        raise DataError(f"{path} is not an index: {printable(str(error))[:200]}") from None


def _decoded(text: bytes) -> Index:
    index = msgspec.json.decode(text, type=Index)
    if index != sealed(index) or index.separator >= index.vocab_size:
        raise DamageError(f"{INDEX} is not what was written")
    return index


def sealed(index: Index) -> Index:
    """Return the index with a digest of its fields, so that a change of a field is noticed."""
    plain = msgspec.structs.replace(index, seal="")
    digest = hashlib.blake2b(msgspec.json.encode(plain), digest_size=16).hexdigest()
    return msgspec.structs.replace(plain, seal=digest)


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a folder whose tokens have been written."""
    replace_file(folder / INDEX, msgspec.json.encode(sealed(index)))


def require_made_for(folder: Path, index: Index, tokenizer: Tokenizer) -> None:
    """Check that tokens were made by a tokenizer.

    Raises:
        ConfigError: If they were made by another one; names the difference.
    """
    same = {
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "dtype": tokenizer.dtype.name,
        "tokenizer": tokenizer.identity,
    }
    for name, value in same.items():
        found = getattr(index, name)
        if found != value:
            shown = printable(str(found)[:60])
            remedy = "; data.separator says which token it is" if name == "separator" else ""
            raise ConfigError(
                f"data.tokenizer must be the one that {printable(folder)} was made with, "
                f"whose {name} ({shown}) is not {value}{remedy}"
            )
