"""The tokens of a run: made of the text once, or taken from the cache, and then kept."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from hp_base.atomic_write import remove_unfinished
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
from hp_data.folders import new_folder
from hp_data.holdout import HoldOut
from hp_data.index import INDEX, Index, read_index, require_made_for, write_index
from hp_data.progress import Progress
from hp_data.tokenizer import Tokenizer
from hp_data.tokens import SPLITS, TokenWriter, new_hasher

OnProgress = Callable[[], None]
Tell = Callable[[str], None]


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

    What is there already is kept: a resumed run reads the very tokens it began with, even if the
    text has changed. On shared storage one process of every node may do this at the same time.

    Args:
        directory: Where the files go; it appears whole or not at all.
        paths: ``data.paths``; empty for the standard library.
        tokenizer: Its ids are stored in the narrowest dtype that holds them.
        eval_fraction: Share of the tokens held out.
        cache: Cache of tokens that other runs have made; None: neither looked at nor filled.
        on_progress: Called again and again, every second or so; what it raises ends the work.
        tell: Told in a line how far it is, every few seconds, and what is left out.

    Raises:
        DataError: When the text cannot be read, or what is there is not what was written.
        ConfigError: When what is there was made with another `eval_fraction`.
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
    """Tell whether there is data; an empty folder is none.

    Raises:
        DataError: When it is a link, no folder, or has no index.
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
    """Digest the text of some files and folders, see `Index.source`.

    Raises:
        DataError: When it cannot be read.
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
    """Take the tokens from the cache, or from the text and put them there."""
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
    """Write both splits; returns their index."""
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


def _note(text: "hashlib.blake2b", piece: Piece, digest: bytes) -> None:
    """Add a piece to what stands for all files in their order, whatever they are called."""
    place = f"{piece.source.kind} {piece.begin} {piece.is_last}\n"
    text.update(place.encode() + digest)


def _digest_of(sources: Iterable[Source], on_progress: OnProgress) -> str:
    text = new_hasher()
    for source in sources:
        for piece in pieces_of(source):
            _note(text, piece, new_hasher(read_piece(piece)[1]).digest())
            on_progress()
    return text.hexdigest()
