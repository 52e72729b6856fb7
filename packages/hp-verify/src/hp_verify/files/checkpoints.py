"""Two checkpoints side by side, tensor by tensor; neither is ever whole in memory."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from hp_base.dtypes import dtype_name
from hp_base.errors import CheckpointError
from hp_checkpoint.manifest import DTYPES
from hp_verify.files.content import Rows
from hp_verify.files.judging import Verdict, is_quantised, judge, judge_quantised, scales_of
from hp_verify.files.made import OTHER, STATE, Made, fused, known, short
from hp_verify.files.sources import (
    Entry,
    Listed,
    Source,
    digest,
    opened_source,
    write_listing,
)
from hp_verify.recording.names import Renaming

_SHOWN = 12
"""Most lines of a kind that a report has."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Names a tensor that is not what it should be.

    Attributes:
        name: Its name in the second checkpoint.
        said: Description of the difference.
        error: Norm of the difference, relative to the first's.
    """

    name: str
    said: str
    error: float

    def __str__(self) -> str:
        return f"{self.name}: {self.error:.3e}, {self.said}"


@dataclass(slots=True)
class CheckpointComparison:
    """Tells what two checkpoints have in common and what not.

    Attributes:
        differences: Tensors that differ.
        missing: Tensors of the first that the second has not -> what there is to say.
        extra: Tensors of the second that the first has not -> what there is to say.
        counts: Finding -> number of tensors.
        made: Way in which tensors of the second are made of the first's -> number of tensors.
        notes: Further remarks.
        largest: Largest error of what is explained by a cast or by rounding.
    """

    differences: list[TensorDifference] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Tell whether nothing differs, is missing or superfluous."""
        return not (self.differences or self.missing or self.extra) and bool(self.counts)


def compare_checkpoints(
    first: Path,
    second: Path,
    *,
    ignore: str | None = None,
    names: Mapping[str, str] | None = None,
) -> CheckpointComparison:
    """Compare two checkpoints of any known formats, which `opened_source` lists.

    Args:
        first: First checkpoint; errors are relative to its tensors.
        second: Second checkpoint, which is judged.
        ignore: Regular expression of names that are not compared.
        names: What is declared: names in the second -> in the first.

    Raises:
        CheckpointError: When one is damaged, or of no known format.
    """
    with opened_source(first) as ours, opened_source(second) as theirs:
        return compare(ours, theirs, ignore=ignore, names=names)


def compare(
    first: Source,
    second: Source,
    *,
    ignore: str | None = None,
    names: Mapping[str, str] | None = None,
) -> CheckpointComparison:
    """Compare two open checkpoints.

    Where the second alone has the config of a run, what else its tensors are called is known, and
    it is the one that errors are relative to.

    Args:
        first: First checkpoint; errors are relative to its tensors.
        second: Second checkpoint, which is judged.
        ignore: Regular expression of names that are not compared.
        names: What is declared: names in the second -> in the first.
    """
    names = names or {}
    if first.config is not None or second.config is None:
        return _Comparing(first, second, ignore, names).result
    turned = {theirs: ours for ours, theirs in names.items()}
    result = _Comparing(second, first, ignore, turned).result
    return replace(result, missing=result.extra, extra=result.missing)


def write_manifest(checkpoint: Path, out: Path) -> int:
    """Write names, shapes, dtypes and digests of a checkpoint's tensors, to be compared elsewhere.

    Args:
        checkpoint: A checkpoint of any known format.
        out: A new JSON file.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: When the checkpoint is damaged, of no known format or a manifest, or the
            file is there.
    """
    tensors: dict[str, Listed] = {}
    with opened_source(checkpoint) as source:
        for name, entry in source.tensors.items():
            if entry.read is None:
                raise CheckpointError(f"{checkpoint} is a manifest itself")
            tensors[name] = Listed(entry.dtype, entry.shape, digest(entry.read()))
    write_listing(out, tensors)
    return len(tensors)


def report_checkpoints(comparison: CheckpointComparison) -> str:
    """Say in lines what was found; the first checkpoint is called A, the second B."""
    shown = [f"FAIL  {difference}" for difference in comparison.differences]
    for letter, names in zip("AB", (comparison.missing, comparison.extra), strict=True):
        shown += [f"FAIL  only in {letter}: {name} {why}" for name, why in names.items()]
    lines = shown[:_SHOWN] + [f"      and {len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)
    lines += [f"note: {note}" for note in comparison.notes[:_SHOWN]]
    lines += [f"      and {n} more" for n in [len(comparison.notes) - _SHOWN] if n > 0]
    lines += [f"{count} made: {how}" for how, count in list(comparison.made.items())[:_SHOWN]]
    for said, count in sorted(comparison.counts.items()):
        error = comparison.largest.get(said)
        lines.append(f"{count} {said}" + (f", by {error:.1e} at most" if error else ""))
    return "\n".join([*lines, "equal" if comparison.is_equal else "NOT EQUAL"])


def _named(names: Iterable[str]) -> list[str]:
    """Return each name that is not read once, with the number of its shards."""
    shards = Counter(name.partition("/shard_")[0] for name in names)
    return [f"{name} ({n} parts)" if n > 1 else name for name, n in sorted(shards.items())]


class _Comparing:
    def __init__(
        self, ours: Source, theirs: Source, ignore: str | None, names: Mapping[str, str]
    ) -> None:
        self._ours, self._theirs, self._declared = ours, theirs, names
        self.result = CheckpointComparison()
        self._used: set[str] = set()
        self._pairs: list[tuple[str, str]] = []
        self._indices: dict[str, Rows] = {}
        here, there = ours.tensors.keys(), theirs.tensors.keys()
        skipped = {n for n in (*here, *there) if ignore is not None and re.search(ignore, n)}
        skipped |= self._states_of_one()
        for source in (ours, theirs):
            if source.left_out:
                shown = ", ".join(_named(source.left_out))
                self.result.notes.append(f"not read of {source.path}, no tensors: {shown}")
        self._known = {n: made for n, made in known(ours).items() if n not in skipped}
        self._short: dict[str, Made] = {}
        for name, made in self._known.items():
            self._short.setdefault(short(name), made)
        self._scales = {
            name: scale
            for name, entry in theirs.tensors.items()
            if is_quantised(entry.dtype)
            for scale in scales_of(name)
            if scale in there
        }
        self._compare([n for n in there if n not in skipped and n not in self._scales.values()])
        self._list_unused([name for name in here if name not in skipped])

    def _states_of_one(self) -> set[str]:
        """Return names of an optimizer's state, where only one checkpoint has such state."""
        states = [{n for n in s.tensors if STATE.search(n)} for s in (self._ours, self._theirs)]
        if all(states):
            return set()
        for source, some in zip((self._ours, self._theirs), states, strict=True):
            if some:
                self.result.notes.append(
                    f"state of the optimizer is in {source.path} alone: {len(some)} tensors"
                )
        return states[0] | states[1]

    def _compare(self, names: list[str]) -> None:
        later = [name for name in names if not self._judge(name, self._by_name(name))]
        for name in sorted(later, key=lambda n: len(self._theirs.tensors[n].shape) < 2):
            self._by_content(name)

    def _by_name(self, name: str) -> list[Made]:
        """Return the expected values of a tensor by its name, for each possible layout."""
        shape = self._theirs.tensors[name].shape
        if (declared := self._declared.get(name)) is not None:
            return [self._known[declared]] if declared in self._known else []
        own = short(name)
        candidates = [
            self._known.get(name),
            self._known.get(f"{name}{OTHER}"),
            self._short.get(own),
            self._short.get(f"{own}{OTHER}"),
            fused(name, self._short),
        ]
        there = [made for made in candidates if made is not None]
        if fitting := [made for made in there if made.shape == shape]:
            return fitting
        turned = (*shape[:-2], *reversed(shape[-2:]))
        return [made.transposed() for made in there if made.shape == turned and len(shape) >= 2]

    def _judge(self, name: str, candidates: list[Made]) -> bool:
        """Compare a tensor with the first candidate that it equals, else with the first of all."""
        if not candidates:
            return False
        entry = self._theirs.tensors[name]
        made = candidates[0]
        verdict = self._verdict(name, entry, made)
        for other in candidates[1:]:
            if not verdict.is_equal and (second := self._verdict(name, entry, other)).is_equal:
                made, verdict = other, second
        self._used.update(made.parts)
        if made.how:
            self.result.made[made.how] += 1
        elif len(made.parts) == 1:
            self._pairs.append((name, made.parts[0]))
        self._note(name, verdict)
        return True

    def _verdict(self, name: str, entry: Entry, made: Made) -> Verdict:
        if entry.shape != made.shape:
            said = f"shape {list(entry.shape)} is not {list(made.shape)}"
            return Verdict(said, False, float("inf"))
        ours = made.read()
        if entry.read is None:
            return _by_digest(entry, ours)
        scale = self._theirs.tensors.get(self._scales.get(name, ""))
        if scale is not None and scale.read is not None:
            return judge_quantised(ours, entry.read(), scale.read())
        return judge(ours, entry.read())

    def _note(self, name: str, verdict: Verdict) -> None:
        if not verdict.is_equal:
            self.result.differences.append(TensorDifference(name, verdict.said, verdict.error))
            self.result.counts["different"] += 1
            return
        self.result.counts[verdict.said] += 1
        if verdict.error:
            largest = self.result.largest
            largest[verdict.said] = max(verdict.error, largest.get(verdict.said, 0.0))

    def _by_content(self, name: str) -> None:
        """Find a tensor whose name says nothing among the values of the first checkpoint."""
        entry = self._theirs.tensors[name]
        renamed = self._known.get(Renaming(self._pairs)(name))
        if renamed is not None and renamed.shape == entry.shape:
            self._judge(name, [renamed])
            return
        shape = list(entry.shape)
        if entry.read is None:
            self._by_its_digest(name, entry)
            return
        found = self._index(entry.dtype).find(entry.read()) if self._known else None
        if found is None:
            self.result.extra[name] = f"{shape}: no tensor of the other has its name or its values"
            return
        if len(found.parts) == 1:
            self._pairs.append((name, found.parts[0]))
        self._used.update(found.parts)
        in_common = re.sub(r"\d+", "*", found.how)  # with findings of other layers
        self.result.made[f"found by values: {in_common}"] += 1
        verdict = judge(found.ours, entry.read())
        if verdict.is_equal and any(
            self._ours.tensors[part].dtype != entry.dtype for part in found.parts
        ):
            verdict = Verdict(f"equal after a cast to {dtype_name(DTYPES[entry.dtype])}", True)
        said = f"{verdict.said} ({found.how})" if not verdict.is_equal else verdict.said
        self._note(name, Verdict(said, verdict.is_equal, verdict.error))

    def _by_its_digest(self, name: str, entry: Entry) -> None:
        """Find a tensor of which a digest is known, among those of its shape."""
        for other, made in self._known.items():
            if made.shape == entry.shape and _by_digest(entry, made.read()).is_equal:
                self._pairs.append((name, other))
                self._judge(name, [made])
                return
        self.result.extra[name] = (
            f"{list(entry.shape)}: no tensor of the other has its name or its digest"
        )

    def _index(self, dtype: str) -> Rows:
        if dtype not in self._indices:
            own = {name: self._known[name] for name in self._ours.tensors if name in self._known}
            self._indices[dtype] = Rows(own, DTYPES[dtype])
        return self._indices[dtype]

    def _list_unused(self, names: list[str]) -> None:
        """List what of the first is nowhere in the second, but for second names of the same."""
        unused = [name for name in names if name not in self._used]
        if self._theirs.format == self._ours.format == "manifest":
            unused = self._only_digests(unused)
        digests: dict[str, str] = {}
        for name in unused:
            entry = self._ours.tensors[name]
            same = ""
            if entry.read is not None:
                mine = digest(entry.read())
                for other in self._used:
                    like = self._ours.tensors[other]
                    if like.shape == entry.shape and like.dtype == entry.dtype and like.read:
                        digests.setdefault(other, digest(like.read()))
                        same = other if digests[other] == mine else same
            if same:
                self.result.notes.append(f"{name} has the values of {same}, which is there")
            else:
                self.result.missing[name] = f"{list(entry.shape)}"

    def _only_digests(self, names: list[str]) -> list[str]:
        """Compare what two manifests say; returns what the second lacks."""
        there = self._theirs.tensors
        for name in names:
            if name in there:
                self.result.extra.pop(name, None)
                mine, other = self._ours.tensors[name], there[name]
                said = "equal" if mine == other else "digests, dtypes or shapes are not the same"
                self._note(name, Verdict(said, mine == other, 0.0 if mine == other else 1.0))
        return [name for name in names if name not in there]


def _by_digest(entry: Entry, ours: Tensor) -> Verdict:
    """Compare values with a digest of what they should have become."""
    dtype = DTYPES[entry.dtype]
    if digest(ours.to(dtype)) == entry.sha256:
        cast = "equal" if ours.dtype == dtype else f"equal after a cast to {dtype_name(dtype)}"
        return Verdict(cast, True)
    return Verdict(
        f"its digest is not that of the values in {dtype_name(dtype)}", False, float("nan")
    )
