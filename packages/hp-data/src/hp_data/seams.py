"""Cuts of a document that is too long to be encoded at once, where they do not change its ids.

A tokenizer may begin a text with a space, join two newlines to one token, or take the whole text as
one word. So a document is cut only at a place that is tested: `Tokenizer.joins` compares the ids of
the text around it with those of both sides, from several beginnings, since a rule that counts
characters could agree by chance with one. The places are those where usual tokenizers end a word:
between a letter and a space before a letter, and at the beginning of a line; in text without such
places, numbers for example, before any single space and at any line. They depend on the file and
the tokenizer alone. If none of them passes, the piece is extended, and memory grows with
it, up to a bound.
"""

import re
from collections.abc import Iterator
from itertools import islice

from hp_base.errors import DataError
from hp_base.folder import read_span
from hp_data.corpus import Piece, Source, opened_source, plain_lines, printable
from hp_data.tokenizer import Tokenizer

LONGEST_BYTES = 1 << 28
"""Most bytes that are encoded at once."""

_AROUND = 2048
_BEGINNINGS = (_AROUND, 1021, 301)  # characters; no number above 1 divides all of them
_SCAN_BYTES = 1 << 16
_TRIED = 16
_PLACES = (
    rb"[A-Za-z](?= [A-Za-z])",
    rb"(?<=\S)\n(?=[A-Za-z\xc3-\xf4])",
    rb"\S(?= [!-~])",
    rb"(?<=\S)\n(?=[!-~])",
)


def cut_text(piece: Piece, tokenizer: Tokenizer) -> tuple[int, bytes]:
    """Return the first byte of the part of a document to encode for a piece, and its bytes.

    Raises:
        DataError: If the file cannot be read, or has no place for a cut.
    """
    source, step = piece.source, piece.end - piece.begin
    with opened_source(source.path) as descriptor:
        begin, end = (
            _seam(descriptor, at, source, tokenizer, step=step) for at in (piece.begin, piece.end)
        )
        return begin, read_span(descriptor, begin, end)


def _seam(descriptor: int, at: int, source: Source, tokenizer: Tokenizer, *, step: int) -> int:
    """Return the first place from a byte on where the document is cut, or its end."""
    if at <= 0 or at >= source.size:
        return max(0, min(at, source.size))
    for begin in range(at, min(at + LONGEST_BYTES, source.size), step):
        found = next(_seams_from(descriptor, begin, tokenizer, step=step), None)
        if found is not None:
            return found
    if at + LONGEST_BYTES < source.size:
        raise DataError(
            f"{printable(source.path)}: data.tokenizer must end a word in the {LONGEST_BYTES} "
            f"bytes from byte {at} on; give the text as a line of JSON per document (.jsonl)"
        )
    return source.size


def _seams_from(descriptor: int, at: int, tokenizer: Tokenizer, *, step: int) -> Iterator[int]:
    """Yield the places in the next bytes where the text may be cut."""
    first = max(0, at - 4 * _AROUND)
    last = at + min(_SCAN_BYTES, step)
    raw = read_span(descriptor, first, last + 4 * _AROUND)
    for places in _PLACES:
        for place in islice(re.compile(places).finditer(raw, at - first, last - first), _TRIED):
            left, right = (
                plain_lines(part.decode(errors="replace"))
                for part in (raw[: place.end()], raw[place.end() :])
            )
            if all(tokenizer.joins(left[-count:], right[:_AROUND]) for count in _BEGINNINGS):
                yield first + place.end()
