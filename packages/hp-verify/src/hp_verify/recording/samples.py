"""Samples of a batch on a rank, their padding, and their places in a module's tensor.

Padding is found by its mask or by a token that all rows end or begin with. A sample is what is not
padding: a job may pad to the longest of each microbatch. A reference writes down which part of a
padded sample is real, and what modules make of that part, beside what they make of all of it; so
does a job that is given the same sample, and then that part alone is compared. A job's sample that
is not the reference's token for token is looked for with some of the token at its end, or at its
beginning, taken away, and what modules make of the rest is compared.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hp_base.dtypes import dtype_name
from hp_verify.recording.digests import Digest, digest_rows, digests_of_rows
from hp_verify.recording.events import REAL, Box, Choice, Rows
from hp_verify.recording.slices import placed, whole
from hp_verify.recording.trees import is_dtensor, tensors_in

_TOKENS = ("input_ids", "tokens")
_SMALL = 1 << 16
"""Most tokens of a batch that are written down themselves."""
_READ = 1 << 14
"""About how many elements of a sample that are not tokens its name is made of."""

_FEWEST = 4
"""Fewer tokens may well be somewhere in a sample that they are no part of."""
_MASKS = {"attention_mask": True, "padding_mask": False, "key_padding_mask": False}
"""Names of masks that are believed, and whether they are true where a token is real. Any other
tensor of two values is a mask where all that it takes away is one token, at ends of samples."""
Span = tuple[int, int]
"""First and last + 1."""


def batch_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return the tensor that identifies the samples of a call: its tokens, or its first tensor."""
    given = [*tensors_in(args), *tensors_in(kwargs)]
    laid = [(name, tensor) for name, tensor in given if tensor.ndim >= 2 and not tensor.is_nested]
    named = [t for name, t in laid if name in _TOKENS and not t.is_floating_point()]
    return next(iter(named or [t for _, t in laid]), None)


def hashes(values: Tensor) -> tuple[str, ...]:
    """Name each sample, `[N, ...]`, by its bits."""
    rows = values.reshape(values.shape[0], -1)
    return tuple(digest.hex() for digest in digests_of_rows(rows, num_bytes=8))


class Made:
    """Remembers outputs of root modules: a module that is given one has the same samples."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, tuple[str, ...]]] = {}

    def add(self, output: object, names: tuple[str, ...]) -> None:
        """Remember whose samples an output is made of; it is not kept alive.

        Args:
            output: Output of a root module.
            names: Names of the output's samples.
        """
        self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
        for _, tensor in tensors_in(output):
            if tensor.ndim >= 2 and len(tensor) == len(names) and not is_dtensor(tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._known[storage.cdata] = storage, names

    def samples_of(self, batch: Tensor) -> tuple[str, ...]:
        """Return the names of the samples of what a root module is given; empty: unknown."""
        if is_dtensor(batch):
            return ()
        key = StorageWeakRef(batch.untyped_storage()).cdata
        storage, names = self._known.get(key, (None, ()))
        return () if storage is None or storage.expired() else names


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a sample here that are some of a reference's sample, in the same order.

    Attributes:
        here: First and last + 1 of them, in every sample that this is about.
        start: First of them there.
        names: The reference's sample of each of these samples.
        length: Tokens of those.
        at: Indices of the samples in the call; empty: all.
    """

    here: Span
    start: int
    names: tuple[str, ...]
    length: int
    at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """The same part of several samples.

    Attributes:
        values: `[samples, ...]`.
        box: Place of each part in its whole sample.
        rows: Names of the samples.
        shape: Shape of each whole sample; empty: that of all of the call.
    """

    values: Tensor
    box: Box
    rows: tuple[str, ...]
    shape: tuple[int, ...] = ()


class Samples:
    """The samples of one call of a root module.

    Args:
        batch: Tokens of the call, `[samples, length]`, or else its first tensor.
        call: Which call in this step and process.
        known: Name -> tokens of the reference's samples in this step; ranks that share a sequence
            have parts of these. None: this is the reference.
        given: Names of the samples behind what another root module has made; empty: none has.
        seen: How often samples were evaluated in the update that is under way, for this batch to be
            added to: their names tell evaluations apart. None: no update is under way.
        kwargs: Arguments of the root module by name, in which a mask may be.
    """

    def __init__(
        self,
        batch: Tensor,
        call: int,
        known: Mapping[str, Sequence[int]] | None,
        *,
        given: tuple[str, ...] = (),
        seen: Counter[str] | None = None,
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        local = batch.to_local() if is_dtensor(batch) else batch
        self._call, self._local = call, local.detach()
        self.has_tokens = local.ndim == 2 and local.dtype in (torch.int64, torch.int32)
        self._length, self._is_reference = local.shape[1], known is None
        names, time = hashes(self._local if self.has_tokens else _some_of(self._local)), ""
        if seen is not None:
            times = {name: f"~{seen[name]}" if seen[name] else "" for name in names}
            seen.update(times.keys())
            time = times[names[0]] if names else ""
            names = tuple(name + times[name] for name in names)
        if not self.has_tokens and len(given) == len(local):
            names = given
        is_known = known is None or all(name in known for name in names)
        if not self.has_tokens and not is_known:
            names = tuple(f"{call}.{i}" for i in range(len(local)))
        self.runs, self.names = [Run((0, self._length), 0, names, self._length)], names
        self._real = real_of(self._local, kwargs) if self.has_tokens else ()
        if is_known:
            real = [REAL + name for name in names]
            are_there = [known is None or name in known for name in real]
            padded = {i: span for i, span in enumerate(self._real) if are_there[i]}
            padded = {i: span for i, span in padded.items() if span != (0, self._length)}
            self.runs += _of_spans(padded, real)
        elif self.has_tokens and known and not is_known:
            then = {
                name: theirs
                for name, theirs in known.items()
                if name.endswith(time) and ("~" in name) == bool(time)
            }
            self._look_for(self._local.tolist(), then)

    def _look_for(self, local: list[list[int]], known: Mapping[str, Sequence[int]]) -> None:
        """Find samples in the reference's, which may be padded otherwise, or longer."""
        found = _unpadded(local, self._real, known) or _runs(local, known) or _packed(local, known)
        if found:
            self.runs = found
            names = {i: n for r in reversed(found) for i, n in zip(r.at, r.names, strict=True)}
            self.names = tuple(names[index] for index in range(len(local)))

    def rows(self, step: int, phase: str) -> Rows:
        """Return what the root module was given."""
        small = self.has_tokens and self._local.numel() <= _SMALL
        tokens = tuple(map(tuple, self._local.tolist())) if small else ()
        real = self._real if self._is_reference else ()
        packed = (name for run in self.runs for name in run.names if name not in self.names)
        names = self.names if self._is_reference else (*self.names, *dict.fromkeys(packed))
        return Rows(step, self._call, names, tokens, phase, self.has_tokens, real)

    def digest(self, tensor: Tensor) -> tuple[tuple[int, ...], list[Digest]] | None:
        """Digest a tensor of some module, sample by sample.

        Returns:
            Shape of one sample, and digests; None where the tensor is not made of samples, or is a
            sum of which ranks have terms.
        """
        laid = self.laid(tensor)
        if laid is None:
            return None
        shape, parts = laid
        made = [replace(digest_rows(p.values, p.box, p.rows), shape=p.shape) for p in parts]
        return shape, made

    def laid(self, tensor: Tensor) -> tuple[tuple[int, ...], list[Laid]] | None:
        """Lay a tensor of some module out, sample by sample.

        Returns:
            Shape of one sample, and parts of samples; None as `digest`.
        """
        values, box, shape = tensor.detach(), None, tuple(tensor.shape)
        if is_dtensor(tensor):
            if any(placement.is_partial() for placement in tensor.placements):
                return None
            values, parts, shape = placed(tensor)
            if len(parts) != 1 or parts[0].box[0] != (0, shape[0]):
                return None
            box = parts[0].box
        laid = self._by_sample(values, shape)
        if laid is None:
            return None
        values, dims = laid
        if box is not None and dims:
            spans = tuple(box[dim] for dim in dims)
            return tuple(shape[dim] for dim in dims), [Laid(values, spans, self.names)]
        return self._in_runs(values)

    def _in_runs(self, values: Tensor) -> tuple[tuple[int, ...], list[Laid]] | None:
        """Lay `[samples, ...]` with a dim of tokens, or without one where samples are whole."""
        sizes = values.shape[1:]
        if len(self.runs) == 1 and self.runs[0].length == self._length:
            return tuple(sizes), [Laid(values, whole(sizes), self.names)]
        dim = list(sizes).index(self._length) if self._length in sizes else None
        is_whole = all((r.start, r.here[1] - r.here[0]) == (0, r.length) for r in self.runs)
        is_whole &= len({at for r in self.runs for at in r.at}) == sum(len(r.at) for r in self.runs)
        if dim is None and not is_whole:
            return None
        parts = [self._of_run(values, run, dim) for run in self.runs]
        return parts[0].shape, parts

    @staticmethod
    def _of_run(values: Tensor, run: Run, dim: int | None) -> Laid:
        """Take what a run is about out of `[samples, ...]`.

        Args:
            values: Values of all samples, `[samples, ...]`.
            run: The run.
            dim: Which dim of a sample is that of tokens; None: none, and the run is a whole sample.
        """
        part = values[list(run.at)] if run.at else values
        sizes = part.shape[1:]
        if dim is None:
            return Laid(part, whole(sizes), run.names, tuple(sizes))
        (first, last), spans = run.here, list(whole(sizes))
        spans[dim] = run.start, run.start + last - first
        shape = *sizes[:dim], run.length, *sizes[dim + 1 :]
        return Laid(part.narrow(dim + 1, first, last - first), tuple(spans), run.names, shape)

    def _by_sample(
        self, values: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, tuple[int, ...]] | None:
        """Lay a tensor as `[samples, ...]`; and which dims of it follow that of samples."""
        count, length = len(self.names), self._length
        is_square = values.ndim >= 3 and shape[0] == shape[1] == count > 1
        if is_square and count != length and self._is_reference:
            return None  # either dim may be that of samples, and neither that of tokens
        if values.ndim >= 1 and shape[0] == count:
            return values, tuple(range(1, values.ndim))
        if values.ndim >= 2 and shape[1] == count:
            return values.transpose(0, 1), (0, *range(2, values.ndim))
        if values.ndim >= 1 and shape[0] == count * length:
            return values.unflatten(0, (count, length)), ()
        return None


def choices_in(output: object, samples: Samples) -> Iterator[Choice]:
    """Yield choices of a module that gives indices `[..., K]` beside scores `[..., E]`, by sample.

    Args:
        output: Output of the module.
        samples: Samples of the call.
    """
    tensors = [
        (place, t.detach())
        for place, t in tensors_in(output)
        if t.ndim >= 2 and not is_dtensor(t) and not t.is_nested
    ]
    found = next((t for _, t in tensors if t.dtype in (torch.int64, torch.int32)), None)
    if found is None:
        return
    shape, width = found.shape[:-1], found.shape[-1]
    wider = (pair for pair in tensors if pair[1].shape[:-1] == shape and pair[1].shape[-1] > width)
    place, scores = next((pair for pair in wider if pair[1].is_floating_point()), ("", None))
    if scores is None:
        return
    chosen = found.long().sort(dim=-1).values
    inside = chosen.clamp(0, scores.shape[-1] - 1)
    others = scores.double().scatter(-1, inside, -torch.inf)
    near = others.topk(min(2, scores.shape[-1] - width), dim=-1).indices
    scored = torch.cat((inside, near), dim=-1)
    # One tensor, so that all of it is laid out alike: [..., K + 2 N] of float64 has all indices.
    table = torch.cat((chosen.double(), scored.double(), scores.double().gather(-1, scored)), -1)
    laid = samples.laid(table)
    for part in laid[1] if laid is not None else ():
        num, of_token = scored.shape[-1], math.prod(part.values.shape[2:-1])
        first = part.box[0][0] * of_token if len(part.box) > 1 else 0
        tokens = part.values.cpu().reshape(len(part.rows), -1, table.shape[-1])
        for row, values in zip(part.rows, tokens, strict=True):
            cut = values.split((width, num, num), dim=-1)
            indices = [some.int().contiguous().numpy().tobytes() for some in cut[:2]]
            yield Choice(
                *(0, "", 0, row, first, dtype_name(scores.dtype), place),
                *(width, indices[0], num, indices[1], cut[2].contiguous().numpy().tobytes()),
            )


def _some_of(values: Tensor) -> Tensor:
    """Return some elements of each sample, `[N, ...]`: enough to tell samples apart."""
    rows = values.reshape(values.shape[0], -1)
    return rows[:, :: max(1, rows.shape[1] // _READ)]


def _unpadded(
    local: list[list[int]], real: Sequence[Span], known: Mapping[str, Sequence[int]]
) -> list[Run]:
    """Find samples without their padding among the reference's; none where one is not there."""
    by_tokens = {tuple(tokens): name for name, tokens in reversed([*known.items()])}
    found = [unpadded(row, by_tokens, real[i : i + 1]) for i, row in enumerate(local)]
    names = [one[0] for one in found if one]
    if len(names) < len(local):
        return []
    return _of_spans({index: one[1] for index, one in enumerate(found) if one}, names)


def _of_spans(spans: Mapping[int, Span], names: Sequence[str]) -> list[Run]:
    """Return the real parts of samples, those of the same span together.

    Args:
        spans: Index of a sample -> its tokens that are no padding.
        names: Names of all samples.
    """
    groups: dict[Span, list[int]] = {}
    for index, span in spans.items():
        groups.setdefault(span, []).append(index)
    return [
        Run((first, last), 0, tuple(names[i] for i in at), last - first, tuple(at))
        for (first, last), at in groups.items()
    ]


def _runs(local: list[list[int]], known: Mapping[str, Sequence[int]]) -> list[Run]:
    """Find samples in the reference's that are longer; none where one is not there.

    In several runs they must be in the same places, in one each may be in a place of its own.
    """
    found = [_found(tokens, known) for tokens in local]
    places = {tuple((here, start) for here, start, _ in runs) for runs in found}
    is_short = min(map(len, local), default=0) < _FEWEST
    if not all(found) or (len(places) > 1 and (is_short or max(map(len, found)) > 1)):
        return []
    groups: dict[tuple[Span, int, int], list[tuple[int, str]]] = {}
    for index, runs in enumerate(found):
        for here, start, name in runs:
            groups.setdefault((here, start, len(known[name])), []).append((index, name))
    return [
        Run(here, start, tuple(n for _, n in some), length, tuple(at for at, _ in some))
        for (here, start, length), some in groups.items()
    ]


def _packed(local: list[list[int]], known: Mapping[str, Sequence[int]]) -> list[Run]:
    """Find rows that are some of the reference's samples end to end, and padding after them."""
    some = [(tuple(tokens), name) for name, tokens in known.items() if len(tokens) >= _FEWEST]
    names = dict(reversed(some))
    sizes = sorted({len(tokens) for tokens in names}, reverse=True)
    runs: list[Run] = []
    for index, row in enumerate(local):
        last, before = 0, len(runs)
        while found := [n for n in sizes if names.keys() & {tuple(row[last : last + n])}]:
            first, last = last, min(last + found[0], len(row))
            runs.append(Run((first, last), 0, (names[*row[first:last],],), last - first, (index,)))
        if len(runs) == before or len({*row[last:]}) > 1:
            return []
    return runs


def _found(
    tokens: list[int], known: Mapping[str, Sequence[int]]
) -> list[tuple[tuple[int, int], int, str]]:
    """Cut tokens into the fewest runs that are in one of the reference's samples."""
    covers = (
        [(here, start, name) for here, start in _cover(tokens, list(theirs))]
        for name, theirs in known.items()
    )
    return min(filter(None, covers), key=len, default=[])


def _cover(tokens: list[int], theirs: list[int]) -> list[tuple[tuple[int, int], int]]:
    """Cut tokens into as few runs of another list as a greedy search finds; none: it cannot be."""
    runs, first, after = [], 0, 0
    while first < len(tokens):
        longest, at = 0, -1
        for start in range(after, len(theirs)):
            size = 0
            while (
                first + size < len(tokens)
                and start + size < len(theirs)
                and tokens[first + size] == theirs[start + size]
            ):
                size += 1
            if size > longest:
                longest, at = size, start
        if not longest:
            return []
        runs.append(((first, first + longest), at))
        first, after = first + longest, at + longest
    return runs


def real_of(tokens: Tensor, kwargs: Mapping[str, object]) -> tuple[Span, ...]:
    """Say which part of each sample is no padding; empty: nothing is known to be padding.

    Args:
        tokens: `[samples, length]`.
        kwargs: Arguments of the model by name; a mask may be among them.
    """
    count, length = tokens.shape
    if not count or not length:
        return ()
    for path, mask in tensors_in(kwargs):
        if mask.shape != tokens.shape or mask is tokens or mask.is_complex():
            continue
        is_real, highest = _MASKS.get(path.rpartition(".")[2]), mask == mask.amax()
        if is_real is not None:
            return _of_mask((mask != 0).eq(is_real))
        if bool((highest | (mask == mask.amin())).all()):
            for real in (highest, ~highest):
                spans = _of_mask(real)
                if spans and tokens[~real].unique().numel() == 1:
                    return spans
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
        if bool((same.sum(1) == runs).all()) and bool(runs.max() < length):
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
