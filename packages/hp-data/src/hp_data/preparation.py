"""The tokens of a run: made from the text once, or copied from the cache, and then kept.

Runs of one user share tokens through the cache. An entry of it is a folder as in a run directory,
named by a digest of everything that determines the tokens. It is copied, and compared with its
digests meanwhile: a damaged one is removed, and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from hp_base.atomic_write import new_folder, remove_unfinished
from hp_base.errors import ConfigError, DataError
from hp_base.own_caches import make_own, opened_own, user_cache
from hp_data.corpus import Corpus, pieces_of, read_piece
from hp_data.encode import count_processes, encode_all
from hp_data.sources.source import Piece, Source, printable
from hp_data.tokenizer import ByteTokenizer, TokenArray, Tokenizer
from hp_data.tokens import (
    INDEX,
    SPLITS,
    Index,
    TokenFile,
    TokenWriter,
    new_hasher,
    read_index,
    write_index,
)

OnProgress = Callable[[], None]
Tell = Callable[[str], None]
_EVERY_SECONDS = 5.0
_COPIED_BYTES = 1 << 24
_NAME = re.compile(r"[0-9a-f]{32}")
_FILES = (INDEX, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "sums")))
_RULES = 3
"""Version of the rules by which ids are made: 3 reads special tokens in text as text."""
_TOGETHER = 8192
_LARGEST_WINDOW = 1 << 22
_LEAST = 1024


def prepare(
    directory: Path,
    *,
    paths: Sequence[str],
    field: str = "",
    tokenizer: Tokenizer,
    eval_fraction: float,
    cache: Cache | None = None,
    on_progress: OnProgress = lambda: None,
    tell: Tell = lambda _: None,
) -> None:
    """Make the tokens of a run, once per run directory; see `HoldOut`.

    Existing tokens are kept: a resumed run reads the same tokens as before, even if the text has
    changed. On shared storage one process of every node may do this at the same time.

    Args:
        directory: Directory of the tokens; it appears whole or not at all.
        paths: Value of ``data.paths``; empty for the standard library.
        field: Value of ``data.field``: name of the column or key with the text.
        tokenizer: Tokenizer of the ids, which are stored in its dtype.
        eval_fraction: Share of the tokens to hold out.
        cache: Cache of tokens of other runs; None: neither read nor filled.
        on_progress: Function that is called about every second; an error of it ends the work.
        tell: Function that prints a line: progress every few seconds, and files left out.

    Raises:
        DataError: If the text cannot be read, or existing tokens are damaged.
        ConfigError: If existing tokens were made with another tokenizer or `eval_fraction`.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(directory.parent)
    if not is_prepared(directory):
        _make(
            directory,
            Corpus(paths, field),
            None if tokenizer.is_cheap else cache,
            tokenizer=tokenizer,
            eval_fraction=eval_fraction,
            on_progress=on_progress,
            tell=tell,
        )
    index = read_index(directory)
    _require_made_for(directory, index, tokenizer)
    if index.eval_fraction != eval_fraction:
        raise ConfigError(
            f"data.eval_fraction ({eval_fraction}) must equal data.eval_fraction "
            f"({index.eval_fraction}) with which {printable(directory)} was made"
        )


def _require_made_for(folder: Path, index: Index, tokenizer: Tokenizer) -> None:
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


def is_prepared(directory: Path) -> bool:
    """Tell whether a directory has tokens; an empty or missing one has none.

    Raises:
        DataError: If it is a link, not a directory, or has files but no index.
    """
    if not os.path.lexists(directory):
        return False
    if directory.is_symlink() or not directory.is_dir():
        raise DataError(f"{printable(directory)} must be a directory and no symbolic link")
    names = [path.name for path in directory.iterdir()]
    if names and INDEX not in names:
        where = printable(directory)
        raise DataError(f"{where}: {INDEX} is missing; without {where}, data.paths are read again")
    return bool(names)


def digest_of_text(paths: Sequence[str], field: str = "") -> str:
    """Return the digest of the text of files and folders, see `Index.source`.

    Raises:
        DataError: If the text cannot be read.
    """
    return _digest_of(Corpus(paths, field).sources(), lambda: None)


def _make(
    directory: Path,
    corpus: Corpus,
    cache: Cache | None,
    *,
    tokenizer: Tokenizer,
    eval_fraction: float,
    on_progress: OnProgress,
    tell: Tell,
) -> None:
    """Copy the tokens from the cache, or make them from the text and store them in the cache."""
    sources = corpus.sources()
    if others := corpus.left_out():
        tell(f"note: {others}")
    if cache is not None and not cache.is_empty:
        key = key_of(
            _digest_of(sources, on_progress), tokenizer.identity, tokenizer.separator, eval_fraction
        )
        if cache.fetch(key, directory, on_progress=on_progress):
            return
    with new_folder(directory) as draft:
        index = _tokenize(
            draft,
            sources,
            tokenizer=tokenizer,
            eval_fraction=eval_fraction,
            on_progress=on_progress,
            tell=tell,
        )
        write_index(draft, index)
        if cache is not None:
            cache.store(draft, index, on_progress=on_progress)


def _tokenize(
    folder: Path,
    sources: Sequence[Source],
    *,
    tokenizer: Tokenizer,
    eval_fraction: float,
    on_progress: OnProgress,
    tell: Tell,
) -> Index:
    """Write both splits, and return their index."""
    text = new_hasher()
    total = sum(source.size for source in sources)
    progress = Progress(total, tell)
    made = encode_all(
        (piece for source in sources for piece in pieces_of(source)),
        tokenizer,
        num_processes=count_processes(sources, tokenizer),
        on_wait=on_progress,
    )
    with (
        closing(made),
        closing(TokenWriter(folder, "train", dtype=tokenizer.dtype)) as train,
        closing(TokenWriter(folder, "eval", dtype=tokenizer.dtype)) as held,
    ):
        stream = HoldOut(train, held, tokenizer.separator, fraction=eval_fraction)
        num_empty = 0
        for part in made:
            if part.is_last:
                _note(text, part.piece, part.digest)
            num_empty += part.num_empty + stream.write(part.tokens)
            progress.add(part.nbytes)
            on_progress()
        stream.finish()
        if num_empty:
            tell(f"note: {num_empty} documents of data.paths give no tokens, and are left out")
        for split, writer in zip(SPLITS, (train, held), strict=True):
            if not writer.tokens:
                raise DataError(f"data.paths hold no text for the {split} split")
        return Index(
            dtype=tokenizer.dtype.name,  # type: ignore[arg-type] # one of three
            vocab_size=tokenizer.vocab_size,
            separator=tokenizer.separator,
            tokenizer=tokenizer.identity,
            eval_fraction=eval_fraction,
            source=text.hexdigest(),
            train=train.finish(),
            eval=held.finish(),
        )


class Progress:
    """A count of the bytes of text that were tokenised, printed every few seconds.

    Args:
        total: Bytes of the whole text.
        tell: Function that prints a line.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        total: int,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._tell, self._clock = total, tell, clock
        self._done = 0
        self._began = self._told = clock()

    def add(self, nbytes: int) -> None:
        """Count more bytes, and print the progress if the last line was a while ago."""
        self._done += nbytes
        now = self._clock()
        if now - self._told < _EVERY_SECONDS:
            return
        self._told = now
        rate = self._done / (now - self._began)
        left = max(0, self._total - self._done) / max(rate, 1)
        self._tell(
            f"tokenised {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB, "
            f"{rate / 1e6:.2f} MB/s, {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _note(text: hashlib.blake2b, piece: Piece, digest: bytes) -> None:
    """Add a piece to the digest of all files in their order, without their names."""
    field = f" {piece.source.field}" if piece.source.field else ""
    place = f"{piece.source.kind} {piece.begin} {piece.is_last}{field}\n"
    text.update(place.encode() + digest)


def _digest_of(sources: Sequence[Source], on_progress: OnProgress) -> str:
    text, tokenizer = new_hasher(), ByteTokenizer()
    pieces = (piece for source in sources for piece in pieces_of(source))
    if all(source.is_plain for source in sources):
        for piece in pieces:
            _note(text, piece, new_hasher(read_piece(piece)[1]).digest())
            on_progress()
        return text.hexdigest()
    # What a file of records holds is read by processes whose memory is bounded.
    number = count_processes(sources, tokenizer)
    made = encode_all(pieces, tokenizer, num_processes=number, on_wait=on_progress)
    with closing(made):
        for part in made:
            if part.is_last:
                _note(text, part.piece, part.digest)
            on_progress()
    return text.hexdigest()


def key_of(
    source: str | None, tokenizer: str | None, separator: int, eval_fraction: float | None
) -> str:
    """Return the name of an entry for a text, tokenizer, separator and held-out share."""
    decides = (_RULES, source, tokenizer, separator, eval_fraction)
    return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()


class Cache:
    """A folder of entries, from which the least recently used are removed when it is too large.

    The folder is not used if it is not this user's own, or open to others. An entry that cannot be
    written is not kept.

    Args:
        folder: Folder of the entries; made with the first entry.
        limit_bytes: Most bytes of all files together.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes

    @classmethod
    def of_user(cls, *, limit_bytes: int) -> Cache | None:
        """Return this user's cache, ``$XDG_CACHE_HOME/hp-train``; None for a limit of 0."""
        return cls(user_cache("hp-train"), limit_bytes=limit_bytes) if limit_bytes else None

    @property
    def is_empty(self) -> bool:
        """Tell whether there are no entries."""
        with self._opened() as folder:
            return folder is None or not any(folder.iterdir())

    def fetch(self, key: str, directory: Path, *, on_progress: Callable[[], None]) -> bool:
        """Copy an entry to a new folder; return False if there is no good one."""
        with self._opened() as folder:
            if folder is None or not os.path.lexists(folder / key):
                return False
            try:
                index = _index_of(folder / key)
                with new_folder(directory) as draft:
                    for split in SPLITS:
                        _copy(TokenFile(folder / key, split, index), draft, split, on_progress)
                    write_index(draft, index)
            except DataError:
                shutil.rmtree(folder / key, ignore_errors=True)
                return False
            with contextlib.suppress(OSError):
                os.utime(folder / key)
            return True

    def store(self, directory: Path, index: Index, *, on_progress: Callable[[], None]) -> None:
        """Keep a copy of a folder that has just been made, and remove entries over the limit."""
        if sum((directory / name).stat().st_size for name in _FILES) > self._limit:
            return
        with contextlib.suppress(OSError):
            make_own(self._folder)
            with self._opened() as folder:
                if folder is None:
                    return
                remove_unfinished(folder)
                with new_folder(folder / _key_of(index)) as draft:
                    for name in _FILES:
                        _copy_plain(directory / name, draft / name, on_progress)
                self._make_room(folder)

    @contextmanager
    def _opened(self) -> Iterator[Path | None]:
        """Yield the folder by its descriptor; None if it is not of this user alone."""
        with opened_own(self._folder) as descriptor:
            yield None if descriptor is None else Path(f"/proc/self/fd/{descriptor}")

    def _make_room(self, folder: Path) -> None:
        """Remove the least recently used entries until the rest is within the limit."""
        entries = [
            (entry.lstat().st_mtime_ns, entry.name, sum(f.lstat().st_size for f in entry.iterdir()))
            for entry in folder.iterdir()
            if _NAME.fullmatch(entry.name)
        ]
        total = sum(size for _, _, size in entries)
        for _, name, size in sorted(entries):
            if total <= self._limit:
                return
            shutil.rmtree(folder / name, ignore_errors=True)
            total -= size


def _index_of(entry: Path) -> Index:
    index = read_index(entry)
    if not isinstance(index, Index) or _key_of(index) != entry.name:
        raise DataError(f"{entry} must have the name of what it holds")
    return index


def _key_of(index: Index) -> str:
    return key_of(index.source, index.tokenizer, index.separator, index.eval_fraction)


def _copy_plain(path: Path, target: Path, on_progress: Callable[[], None]) -> None:
    """Copy a file that this process has written, piece by piece."""
    with path.open("rb") as source, target.open("xb") as copy:
        while data := source.read(_COPIED_BYTES):
            copy.write(data)
            on_progress()


def _copy(tokens: TokenFile, folder: Path, split: str, on_progress: Callable[[], None]) -> None:
    """Copy a split chunk by chunk, each compared with its digest."""
    (folder / f"{split}.sums").write_bytes(tokens.sums)
    with (folder / f"{split}.bin").open("xb") as file:
        for chunk in range(tokens.num_chunks):
            file.write(tokens.verified(chunk))
            on_progress()


class HoldOut:
    """A split of a stream of tokens into two files: for training, and held out for evaluation.

    The text is one stream of tokens, files in their order. Of every window of it, and of the
    shorter window at its end, the last `fraction` is held out. Windows are so long that 8192 tokens
    are held out together. The held-out tokens depend only on the text, the tokenizer and the
    fraction, and one file is enough. Of a text that does not fill a window, at least 1024 tokens
    are held out, or a quarter if that is less. A document that is cut ends in both parts with a
    separator, like two documents.

    Args:
        train: Writer of the training tokens.
        held: Writer of the held-out tokens.
        separator: Token that ends a document.
        fraction: Share to hold out, above 0 and below 1.
    """

    def __init__(
        self, train: TokenWriter, held: TokenWriter, separator: int, *, fraction: float
    ) -> None:
        self._train, self._held, self._fraction = train, held, fraction
        self._separator = separator
        self._window = min(math.ceil(_TOGETHER / fraction), _LARGEST_WINDOW)
        self._parts: list[TokenArray] = []
        self._size = 0
        self._in_document = False

    def write(self, tokens: TokenArray) -> int:
        """Take more of the stream, without a first separator that ends a document without tokens.

        Returns:
            Number of separators left out, 0 or 1.
        """
        num_empty = int(not self._in_document and tokens.size > 0 and tokens[0] == self._separator)
        tokens = tokens[num_empty:]
        if tokens.size:
            self._in_document = bool(tokens[-1] != self._separator)
        while self._size + tokens.size >= self._window:
            missing = self._window - self._size
            self._parts.append(tokens[:missing])
            tokens = tokens[missing:]
            self._deal(math.ceil(self._fraction * self._window))
        if tokens.size:
            self._parts.append(tokens)
            self._size += tokens.size
        return num_empty

    def finish(self) -> None:
        """Write the last tokens of the stream to both files."""
        if self._size:
            least = 0 if self._train.tokens else min(_LEAST, self._size // 4)
            self._deal(max(math.ceil(self._fraction * self._size), least))

    def _deal(self, num_held: int) -> None:
        window = np.concatenate(self._parts)
        self._parts, self._size = [], 0
        for part, writer in zip(
            np.split(window, [-num_held]), (self._train, self._held), strict=True
        ):
            if part.size:
                writer.write(part)
                if part[-1] != self._separator:
                    writer.write(np.full(1, self._separator, dtype=part.dtype))
