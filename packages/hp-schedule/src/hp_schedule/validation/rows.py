"""The rules that can be seen in the rows alone, without running them."""

from collections.abc import Iterator

from hp_schedule.dataflow import Dataflow, dataflow
from hp_schedule.packing import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    BWD_WEIGHT,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    PLACE_MASK,
    RECEIVE_OF,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    leaves,
    unpack,
)
from hp_schedule.schedule import Schedule
from hp_schedule.validation.report import Finding, FindingKind, finding_at

# What has been seen of a (stage, microbatch): bit k is the step of kind k, and one more bit is the
# gradient of the input, whichever step computes it.
_GRADIENT = 1 << FIRST_OVERLAP
_SPLIT = 1 << BWD_INPUT | 1 << BWD_WEIGHT
_SETS = {kind: 1 << kind for kind in range(FIRST_FSDP)} | {
    BWD: 1 << BWD | _GRADIENT,
    BWD_INPUT: 1 << BWD_INPUT | _GRADIENT,
}
_CLASHES = {kind: 1 << kind for kind in range(FIRST_FSDP)} | {
    BWD: 1 << BWD | _SPLIT,
    BWD_INPUT: 1 << BWD_INPUT | 1 << BWD,
    BWD_WEIGHT: 1 << BWD_WEIGHT | 1 << BWD,
}
_NEEDS = {
    FWD: 0,
    BWD: 1 << FWD,
    BWD_INPUT: 1 << FWD,
    BWD_WEIGHT: 1 << BWD_INPUT,
    FWD_SEND: 1 << FWD,
    FWD_RECV: 0,
    BWD_SEND: _GRADIENT,
    BWD_RECV: 0,
}

_Rule = tuple[int, int, int, int, int, int]
"""For a kind of step of a stage: the bits that must be set before it, that must not be set, that it
sets, where the bits of its microbatch 0 are; where those of the stage of its own rank that hands it
its input are (-1 for none), and which of these must be set."""


class RowCheck:
    """Walks every row once.

    Args:
        schedule: The schedule.
        forward_only: Whether backward steps must be absent; otherwise all must be there.
        communication: Whether messages must be there; otherwise none may be.
    """

    def __init__(self, schedule: Schedule, *, forward_only: bool, communication: bool) -> None:
        self._schedule = schedule
        self._flow: Dataflow = dataflow(schedule)
        self._forward_only = forward_only
        self._communication = communication
        self._seen = [0] * (schedule.num_stages * schedule.num_microbatches)
        self._rules = self._all_rules()

    def findings(self) -> Iterator[Finding]:
        """Yield every broken rule, row by row, then what is missing."""
        for rank, row in enumerate(self._schedule.steps):
            yield from self._row(rank, row.codes())
        yield from self._missing()

    def _row(self, rank: int, row: list[int]) -> Iterator[Finding]:
        rule_of, seen = self._rules[rank].get, self._seen
        for position, code in enumerate(row):
            rule = rule_of(code & PLACE_MASK)
            if rule is not None:
                needs, clashes, sets, base, source, handed = rule
                index = base + (code >> MICROBATCH_SHIFT)
                bits = seen[index]
                if (
                    bits & needs == needs
                    and not bits & clashes
                    and (source < 0 or seen[source + (code >> MICROBATCH_SHIFT)] & handed)
                ):
                    seen[index] = bits | sets
                    continue
            if code >= 0:
                yield from self._look_closer(code, rank, position)

    def _look_closer(self, cell: int, rank: int, position: int) -> Iterator[Finding]:
        """Check an overlap, whose halves both need their inputs before it, or a broken rule."""
        parts = leaves(cell)
        for code in parts:
            problem = self._problem(code, rank)
            if problem is not None:
                yield finding_at(*problem, rank, position)
        for code in parts:
            rule = self._rules[rank].get(code & PLACE_MASK)
            if rule is not None:
                self._seen[rule[3] + (code >> MICROBATCH_SHIFT)] |= rule[2]

    def _problem(self, code: int, rank: int) -> tuple[FindingKind, str] | None:
        kind, stage = code & KIND_MASK, code >> STAGE_SHIFT & STAGE_MASK
        where = self._schedule.stage_to_rank[stage]
        if where != rank:
            return FindingKind.PLACEMENT, f"{unpack(code)} belongs to rank {where}"
        if kind >= FIRST_FSDP:
            return None
        rule = self._rules[rank].get(code & PLACE_MASK)
        if rule is None:
            return FindingKind.UNNEEDED, f"{unpack(code)} {self._why_unneeded(kind, stage)}"
        return self._broken(rule, code)

    def _broken(self, rule: _Rule, code: int) -> tuple[FindingKind, str] | None:
        needs, clashes, _, base, source, handed = rule
        kind, stage = code & KIND_MASK, code >> STAGE_SHIFT & STAGE_MASK
        microbatch = code >> MICROBATCH_SHIFT
        bits = self._seen[base + microbatch]
        if bits & clashes:
            again = "stands twice" if bits >> kind & 1 else "repeats a backward"
            return FindingKind.DUPLICATE, f"{unpack(code)} {again}"
        missing = needs & ~bits
        if missing:
            return _before(code, stage, _lowest(missing))
        if source >= 0 and not self._seen[source + microbatch] & handed:
            return _before(code, source // self._schedule.num_microbatches, _lowest(handed))
        return None

    def _why_unneeded(self, kind: int, stage: int) -> str:
        if FWD_SEND <= kind <= BWD_RECV:
            if self._flow.peer[kind][stage] < 0:
                return "has no other rank to talk to"
            if not self._communication:
                return "is a message of a schedule that must have none"
        return "belongs to a backward of a schedule that must have none"

    def _all_rules(self) -> list[dict[int, _Rule]]:
        rules: list[dict[int, _Rule]] = [{} for _ in self._schedule.steps]
        for stage, rank in enumerate(self._schedule.stage_to_rank):
            for kind in self._expected(stage):
                rules[rank][encode(kind, stage)] = self._rule(kind, stage, rank)
        return rules

    def _expected(self, stage: int) -> list[int]:
        """Return the kinds of steps that a stage may have."""
        kinds = [FWD] if self._forward_only else [FWD, BWD, BWD_INPUT, BWD_WEIGHT]
        if self._communication:
            messages = [FWD_SEND, FWD_RECV]
            messages += [] if self._forward_only else [BWD_SEND, BWD_RECV]
            kinds += [kind for kind in messages if self._flow.peer[kind][stage] >= 0]
        return kinds

    def _rule(self, kind: int, stage: int, rank: int) -> _Rule:
        schedule = self._schedule
        needs, source, handed = _NEEDS[kind], -1, 0
        if kind in RECEIVE_OF:
            forward = kind == FWD
            neighbour = (schedule.upstream if forward else schedule.downstream)[stage]
            if neighbour >= 0 and schedule.stage_to_rank[neighbour] == rank:
                source = neighbour * schedule.num_microbatches
                handed = 1 << FWD if forward else _GRADIENT
            elif neighbour >= 0 and self._communication:
                needs |= 1 << RECEIVE_OF[kind]
        base = stage * schedule.num_microbatches
        return needs, _CLASHES[kind], _SETS[kind], base, source, handed

    def _missing(self) -> Iterator[Finding]:
        num = self._schedule.num_microbatches
        for stage, rank in enumerate(self._schedule.stage_to_rank):
            expected = sum(1 << kind for kind in self._expected(stage))
            full = expected & ~_SPLIT
            split = expected & ~(1 << BWD)
            cells = self._seen[stage * num : (stage + 1) * num]
            complete = {
                bits | (bits >> BWD & 1 or bits >> BWD_INPUT & 1) * _GRADIENT
                for bits in (full, split)
            }
            if complete.issuperset(cells):
                continue
            for microbatch, bits in enumerate(cells):
                if bits not in complete:
                    target = split if bits & _SPLIT else full
                    yield from _absent(target & ~bits, stage, microbatch, rank)


def _lowest(bits: int) -> int:
    """Return the kind of the lowest bit; a full backward for a gradient."""
    return BWD if bits == _GRADIENT else (bits & -bits).bit_length() - 1


def _before(code: int, stage: int, kind: int) -> tuple[FindingKind, str]:
    needed = encode(kind, stage, code >> MICROBATCH_SHIFT)
    return FindingKind.ORDER, f"{unpack(code)} stands before {unpack(needed)}"


def _absent(bits: int, stage: int, microbatch: int, rank: int) -> Iterator[Finding]:
    for kind in range(FIRST_FSDP):
        if bits >> kind & 1:
            step = unpack(encode(kind, stage, microbatch))
            yield finding_at(FindingKind.MISSING, f"{step} is missing", rank, None)
