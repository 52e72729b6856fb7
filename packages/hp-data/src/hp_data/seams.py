"""Cuts of a document that is too long to be encoded whole, so that its ids stay the same.

A tokenizer may begin a text with a space, join two newlines to one token, or take all text for one
word. So a document is cut where it shows that this makes no difference: `Tokenizer.joins` compares
the ids of what is around with those of both sides, from several beginnings, since a rule that
counts characters from somewhere would agree by chance with one. Tried are those places where usual
tokenizers end a word: between a letter and a space before a letter, and at the beginning of a line.
Each depends on the file and the tokenizer alone. Where none of them will do, the piece goes on:
memory grows with it, to a bound.
"""

import re
from collections.abc import Iterator
from itertools import islice

from hp_base.errors import DataError
from hp_base.folder import read_span
from hp_data.corpus import Piece, Source, opened_source, plain_lines, printable
from hp_data.tokenizer import Tokenizer

LONGEST_BYTES = 1 << 28
"""What is encoded as a whole at most."""

_AROUND = 2048
_BEGINNINGS = (_AROUND, 1021, 301)  # characters; no number above 1 divides all of them
_SCAN_BYTES = 1 << 16
_TRIED = 16
_PLACES = (rb"[A-Za-z](?= [A-Za-z])", rb"(?<=\S)\n(?=[A-Za-z\xc3-\xf4])")


def cut_text(piece: Piece, tokenizer: Tokenizer) -> tuple[int, bytes]:
    """Find where the part of a document begins that is encoded for a piece, and its bytes, if any.

    Raises:
        DataError: When the file cannot be read, or must be cut and cannot.
    """
    source, step = piece.source, piece.end - piece.begin
    with opened_source(source.path) as descriptor:
        begin, end = (
            _seam(descriptor, at, source, tokenizer, step=step) for at in (piece.begin, piece.end)
        )
        return begin, read_span(descriptor, begin, end)


def _seam(descriptor: int, at: int, source: Source, tokenizer: Tokenizer, *, step: int) -> int:
    """Return the first place from a byte on where the document is cut, or its end.

    Of the last piece, which is shorter than the others, no step is looked at.
    """
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
