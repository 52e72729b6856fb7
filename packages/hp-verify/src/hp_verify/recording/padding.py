"""Padding of a batch, found by its mask or by a token that all rows end or begin with.

A sample is what is not padding: a job may pad to the longest of each microbatch. A reference writes
down which part of a padded sample is real, and what modules make of that part, beside what they
make of all of it. A job's sample that is not the reference's token for token is looked for with
some of the token at its end, or at its beginning, taken away, and what modules make of the rest is
compared.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from hp_verify.recording.trees import tensors_in

_MASKS = {"attention_mask": True, "padding_mask": False, "key_padding_mask": False}
"""Names of masks, and whether they are true where a token is real."""
Span = tuple[int, int]
"""First and last + 1."""


def real_of(tokens: Tensor, kwargs: Mapping[str, object]) -> tuple[Span, ...]:
    """Say which part of each sample is no padding; empty: nothing is known to be padding.

    Args:
        tokens: `[samples, length]`.
        kwargs: Keyword arguments of the model; a mask may be among them.
    """
    count, length = tokens.shape
    if not count or not length:
        return ()
    for path, mask in tensors_in(kwargs):
        is_real = _MASKS.get(path.rpartition(".")[2])
        if is_real is not None and mask.shape == tokens.shape and not mask.is_complex():
            return _of_mask((mask != 0).eq(is_real))
    spans = _of_ends(tokens)
    if not spans:
        spans = tuple((length - b, length - a) for a, b in _of_ends(tokens.flip(1)))
    return spans


def _of_mask(real: Tensor) -> tuple[Span, ...]:
    """Return the span of real tokens of each row; empty: a row has several, or all are real."""
    counts, length = real.sum(1), real.shape[1]
    first = real.int().argmax(1)
    last = length - real.flip(1).int().argmax(1)
    if bool(((last - first) != counts).any()) or not bool((counts > 0).all()):
        return ()
    spans = tuple(zip(first.tolist(), last.tolist(), strict=True))
    return spans if any(span != (0, length) for span in spans) else ()


def _of_ends(tokens: Tensor) -> tuple[Span, ...]:
    """Return spans before a token that all rows end with, one row twice, and have only there."""
    length = tokens.shape[1]
    last = tokens[:, -2:]  # rows that end in a token once may well be so by themselves
    ends = last[:, -1][last.amin(1) == last.amax(1)] if length > 1 else last[:0, 0]
    for token in ends.unique().tolist():
        same = tokens == token
        runs = same.flip(1).int().cumprod(1).sum(1)
        is_at_ends = bool((same.sum(1) == runs).all())
        if is_at_ends and bool(runs.max() < length):
            return tuple((0, length - run) for run in runs.tolist())
    return ()


def unpadded(
    row: Sequence[int], names: Mapping[tuple[int, ...], str], real: Iterable[Span]
) -> tuple[str, Span] | None:
    """Find a sample whose tokens are those of a row without its padding.

    Args:
        row: Tokens.
        names: Tokens of the reference's samples -> name; of a padded one the real part is there as
            well.
        real: The part of the row that is known to be real, if it is.
    """
    for first, last in (*real, *_without_ends(row)):
        name = names.get(tuple(row[first:last]))
        if name is not None:
            return name, (first, last)
    return None


def _without_ends(row: Sequence[int]) -> Iterable[Span]:
    """Yield spans without some of the equal tokens at the end, or at the beginning."""
    last = len(row)
    while last > 1 and row[last - 1] == row[-1]:
        yield 0, last
        last -= 1
    yield 0, last
    first = 0
    while first < len(row) - 1 and row[first] == row[0]:
        first += 1
        yield first, len(row)
