"""Folders of tokens that the first version wrote: verified as a whole, then given digests."""

from pathlib import Path

import numpy as np

from hp_train.base.atomic_write import replace_file
from hp_train.base.folder import DamageError, opened, opened_directory, read_into
from hp_train.data.corpus import printable
from hp_train.data.index import Index, OldIndex, Split, write_index
from hp_train.data.tokenizer import Tokenizer
from hp_train.data.tokens import CHUNK_BYTES, SPLITS, digest_of_split, new_hasher
from hp_train.errors import DataError


def renew(folder: Path, old: OldIndex, tokenizer: Tokenizer) -> Index:
    """Give a folder of the first version the digests of this one, if it is what was written then.

    Raises:
        DataError: When it is not.
    """
    splits = {}
    for split, about in zip(SPLITS, (old.train, old.eval), strict=True):
        path = folder / f"{split}.bin"
        sums, found = _sums_of_old(path)
        tokens, rest = divmod(path.stat().st_size, np.dtype(about.dtype).itemsize)
        if found != about.digest or (tokens, rest) != (about.tokens, 0):
            raise DataError(f"{printable(path)} is not what was written")
        replace_file(folder / f"{split}.sums", sums)
        digest = digest_of_split(sums, tokens, np.dtype(about.dtype))
        splits[split] = Split(tokens=tokens, digest=digest)
    index = Index(
        dtype=old.train.dtype,
        # It was the number of ids, which is less than the largest where they have gaps.
        vocab_size=max(old.vocab_size, tokenizer.vocab_size),
        separator=old.separator,
        tokenizer=None,
        eval_fraction=None,
        source=None,
        train=splits["train"],
        eval=splits["eval"],
    )
    write_index(folder, index)
    return index


def old_digest(path: Path) -> str:
    """What the first version took for the digest of a split: of all its bytes.

    Raises:
        DataError: When it cannot be read.
    """
    return _sums_of_old(path)[1]


def _sums_of_old(path: Path) -> tuple[bytes, str]:
    """The digests of the chunks of a file, and that of all of it."""
    sums, whole = bytearray(), new_hasher()
    try:
        with opened_directory(path.parent) as directory, opened(directory, path.name) as descriptor:
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while size := read_into(descriptor, buffer):
                sums += new_hasher(buffer[:size]).digest()
                whole.update(buffer[:size])
    except DamageError as error:
        raise DataError(f"{printable(path.parent)}: {error}") from None
    except OSError as error:
        raise DataError(f"{printable(path)}: {error.strerror}") from None
    return bytes(sums), whole.hexdigest()
