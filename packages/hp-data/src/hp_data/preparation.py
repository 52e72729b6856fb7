"""The tokens of a run: made from the text once, or copied from the cache, and then kept."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from hp_base.atomic_write import new_folder, remove_unfinished
from hp_base.errors import ConfigError, DataError
from hp_data.cache import Cache, key_of
from hp_data.corpus import (
    Piece,
    Source,
    find_sources,
    left_out,
    pieces_of,
    printable,
    read_piece,
)
from hp_data.encode import count_processes, encode_all
from hp_data.holdout import HoldOut
from hp_data.index import INDEX, Index, read_index, require_made_for, write_index
from hp_data.tokenizer import Tokenizer
from hp_data.tokens import SPLITS, TokenWriter, new_hasher

OnProgress = Callable[[], None]
Tell = Callable[[str], None]
_EVERY_SECONDS = 5.0


def prepare(
    directory: Path,
    *,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    eval_fraction: float,
    cache: Cache | None = None,
    on_progress: OnProgress = lambda: None,
    tell: Tell = lambda _: None,
) -> None:
    """Make the tokens of a run, once per run directory; see `hp_data.holdout`.

    Existing tokens are kept: a resumed run reads the same tokens as before, even if the text has
    changed. On shared storage one process of every node may do this at the same time.

    Args:
        directory: Directory of the tokens; it appears whole or not at all.
        paths: Value of ``data.paths``; empty for the standard library.
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
            paths,
            None if tokenizer.is_cheap else cache,
            tokenizer=tokenizer,
            eval_fraction=eval_fraction,
            on_progress=on_progress,
            tell=tell,
        )
    index = read_index(directory)
    require_made_for(directory, index, tokenizer)
    if index.eval_fraction != eval_fraction:
        raise ConfigError(
            f"data.eval_fraction ({eval_fraction}) must equal data.eval_fraction "
            f"({index.eval_fraction}) with which {printable(directory)} was made"
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


def digest_of_text(paths: Sequence[str]) -> str:
    """Return the digest of the text of files and folders, see `Index.source`.

    Raises:
        DataError: If the text cannot be read.
    """
    return _digest_of(find_sources(paths), lambda: None)


def _make(
    directory: Path,
    paths: Sequence[str],
    cache: Cache | None,
    *,
    tokenizer: Tokenizer,
    eval_fraction: float,
    on_progress: OnProgress,
    tell: Tell,
) -> None:
    """Copy the tokens from the cache, or make them from the text and store them in the cache."""
    sources = list(find_sources(paths))
    if others := left_out(paths):
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
        num_processes=count_processes(total, tokenizer),
        on_wait=on_progress,
    )
    with (
        closing(made),
        closing(TokenWriter(folder, "train", dtype=tokenizer.dtype)) as train,
        closing(TokenWriter(folder, "eval", dtype=tokenizer.dtype)) as held,
    ):
        stream = HoldOut(train, held, tokenizer.separator, fraction=eval_fraction)
        num_empty = 0
        for piece, digest, tokens, empty in made:
            _note(text, piece, digest)
            num_empty += empty + stream.write(tokens)
            progress.add(piece.end - piece.begin)
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
        left = (self._total - self._done) / rate
        self._tell(
            f"tokenised {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB, "
            f"{rate / 1e6:.2f} MB/s, {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _note(text: "hashlib.blake2b", piece: Piece, digest: bytes) -> None:
    """Add a piece to the digest of all files in their order, without their names."""
    place = f"{piece.source.kind} {piece.begin} {piece.is_last}\n"
    text.update(place.encode() + digest)


def _digest_of(sources: Iterable[Source], on_progress: OnProgress) -> str:
    text = new_hasher()
    for source in sources:
        for piece in pieces_of(source):
            _note(text, piece, new_hasher(read_piece(piece)[1]).digest())
            on_progress()
    return text.hexdigest()
