"""The rules that rows show without being run: steps, their order, memory and sharded parameters."""

from collections.abc import Iterator

from hp_schedule.costs import Costs
from hp_schedule.schedule import Dataflow, Schedule, dataflow
from hp_schedule.simulation.recurrence import peak_memory
from hp_schedule.steps import (
    ANY_MICROBATCH,
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    BWD_WEIGHT,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FSDP_KINDS,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    OFFLOAD,
    PLACE_MASK,
    RECEIVE_OF,
    RECOMPUTE,
    RELOAD,
    RETENTION_KINDS,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    is_compute,
    leaves,
    unpack,
)
from hp_schedule.validation.report import Finding, FindingKind, finding_at


def gathered_stages(schedule: Schedule) -> frozenset[int]:
    """Return the stages whose parameters must be gathered: those declared, else all or none."""
    return _declared(schedule, schedule.gathered_stages, {FSDP_UNSHARD, FSDP_RESHARD})


def reduced_stages(schedule: Schedule) -> frozenset[int]:
    """Return the stages whose gradients must be reduced: those declared, else all or none."""
    return _declared(schedule, schedule.reduced_stages, {FSDP_REDUCE_GRAD})


def _declared(
    schedule: Schedule, stages: tuple[int, ...] | None, kinds: set[int]
) -> frozenset[int]:
    if stages is not None:
        return frozenset(stages)
    return frozenset(range(schedule.num_stages) if schedule.kinds & kinds else ())


class ShardingCheck:
    """Follows the parameters of each rank's stages through its row.

    Args:
        schedule: The schedule.
        forward_only: Whether it has no gradients to reduce.
        max_active_stages: Most stages a rank may hold gathered at once; None for no limit.
    """

    def __init__(
        self, schedule: Schedule, *, forward_only: bool, max_active_stages: int | None
    ) -> None:
        self._schedule = schedule
        self._cap = max_active_stages
        self._managed = gathered_stages(schedule)
        self._to_reduce = frozenset() if forward_only else reduced_stages(schedule)
        self._gathered: set[int] = set()
        self._reduced: set[int] = set()

    def findings(self) -> Iterator[Finding]:
        """Yield every broken rule, row by row."""
        steps = self._schedule.kinds & FSDP_KINDS
        if not (steps or self._managed or self._to_reduce):
            return
        for rank, row in enumerate(self._schedule.steps):
            yield from self._row(rank, row.codes())

    def _row(self, rank: int, row: list[int]) -> Iterator[Finding]:
        self._gathered.clear()
        marks = [p for p, code in enumerate(row) if FIRST_FSDP <= code & KIND_MASK < FIRST_OVERLAP]
        steps = [(row[p] & KIND_MASK, row[p] >> STAGE_SHIFT & STAGE_MASK) for p in marks]
        here = set(self._schedule.stages_of(rank))
        managed = {stage for kind, stage in steps if kind == FSDP_UNSHARD} & self._managed
        for stage in sorted(here & self._managed - managed):
            yield _finding("is sharded and never unsharded", stage, rank, None)
        begin = 0
        for mark, (kind, stage) in zip(marks, steps, strict=True):
            yield from self._uses(rank, row, range(begin, mark), managed)
            text = self._apply(kind, stage)
            if text is not None:
                yield _finding(text, stage, rank, mark)
            begin = mark + 1
        yield from self._uses(rank, row, range(begin, len(row)), managed)
        for stage in sorted(self._gathered):
            yield _finding("is left unsharded", stage, rank, None)
        for stage in sorted(here & self._to_reduce - self._reduced):
            yield _finding("never reduces its gradients", stage, rank, None)

    def _uses(
        self, rank: int, row: list[int], cells: range, managed: set[int]
    ) -> Iterator[Finding]:
        """Check the compute steps between two FSDP steps: all kinds of them at once."""
        found = {row[position] & ANY_MICROBATCH for position in cells}
        broken = {key for key in found if is_compute(key) and self._misuse(key, managed)}
        for position in cells if broken else ():
            misuse = self._misuse(row[position], managed) if is_compute(row[position]) else None
            if misuse is not None:
                yield _finding(*misuse, rank, position)

    def _misuse(self, code: int, managed: set[int]) -> tuple[str, int] | None:
        for leaf in leaves(code):
            stage = leaf >> STAGE_SHIFT & STAGE_MASK
            if stage in managed and stage not in self._gathered:
                return "computes while its parameters are sharded", stage
            if stage in self._reduced and leaf & KIND_MASK in {BWD, BWD_WEIGHT}:
                return "accumulates gradients after they were reduced", stage
        return None

    def _apply(self, kind: int, stage: int) -> str | None:
        """Apply an FSDP step; return a description of its mistake, if it has one."""
        if kind == FSDP_REDUCE_GRAD:
            return self._reduce(stage)
        if stage not in self._managed:
            return "is not sharded"
        if kind == FSDP_RESHARD:
            was_gathered = stage in self._gathered
            self._gathered.discard(stage)
            return None if was_gathered else "is not unsharded"
        return self._gather(stage)

    def _gather(self, stage: int) -> str | None:
        if stage in self._gathered:
            return "is unsharded already"
        self._gathered.add(stage)
        if self._cap is not None and len(self._gathered) > self._cap:
            return f"is one of {len(self._gathered)} unsharded, that must be <= {self._cap}"
        return None

    def _reduce(self, stage: int) -> str | None:
        again = stage in self._reduced
        self._reduced.add(stage)
        if stage not in self._to_reduce:
            return "reduces gradients that are not to be reduced"
        return "reduces its gradients twice" if again else None


def _finding(text: str, stage: int, rank: int, position: int | None) -> Finding:
    return finding_at(FindingKind.FSDP, f"stage {stage} {text}", rank, position)


_ROUNDING = 1e-9


# What has been seen of a (stage, microbatch): bit k is the step of kind k. One more bit is the
# gradient of the input, whichever step computes it, and one says that what the forward has kept is
# away: an OFFLOAD sets it, a RELOAD clears it.
_GRADIENT = 1 << FIRST_OVERLAP
_AWAY = 1 << FIRST_OVERLAP + 1
_SPLIT = 1 << BWD_INPUT | 1 << BWD_WEIGHT
_COPIES = 1 << OFFLOAD | 1 << RELOAD
_SETS = {kind: 1 << kind for kind in range(FIRST_FSDP)} | {
    BWD: 1 << BWD | _GRADIENT,
    BWD_INPUT: 1 << BWD_INPUT | _GRADIENT,
    OFFLOAD: 1 << OFFLOAD | _AWAY,
    RELOAD: 1 << RELOAD | _AWAY,
}
_CLASHES = {kind: 1 << kind for kind in range(FIRST_FSDP)} | {
    BWD: 1 << BWD | _SPLIT | _AWAY,
    BWD_INPUT: 1 << BWD_INPUT | 1 << BWD | _AWAY,
    BWD_WEIGHT: 1 << BWD_WEIGHT | 1 << BWD,
    RECOMPUTE: 1 << RECOMPUTE | _GRADIENT | 1 << OFFLOAD,
    OFFLOAD: 1 << OFFLOAD | _GRADIENT | 1 << RECOMPUTE,
    RELOAD: 1 << RELOAD | _GRADIENT,
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
    RECOMPUTE: 1 << FWD,
    OFFLOAD: 1 << FWD,
    RELOAD: 1 << OFFLOAD,
}

_Rule = tuple[int, int, int, int, int, int]
"""For a kind of step of a stage: the bits that must be set before it, that must not be set, that it
turns over, where the bits of its microbatch 0 are; where those of the stage of its own rank that
hands it its input are (-1 for none), and which of these must be set."""


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
        """Yield every broken rule, row by row, then missing steps."""
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
                    seen[index] = bits ^ sets
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
                index = rule[3] + (code >> MICROBATCH_SHIFT)
                back = _AWAY if code & KIND_MASK == RELOAD else 0
                self._seen[index] = (self._seen[index] | rule[2]) & ~back

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
        stage = code >> STAGE_SHIFT & STAGE_MASK
        microbatch = code >> MICROBATCH_SHIFT
        bits = self._seen[base + microbatch]
        if bits & clashes:
            return self._clash(code, bits)
        missing = needs & ~bits
        if missing:
            return _before(code, stage, _lowest(missing))
        if source >= 0 and not self._seen[source + microbatch] & handed:
            return _before(code, source // self._schedule.num_microbatches, _lowest(handed))
        return None

    def _clash(self, code: int, bits: int) -> tuple[FindingKind, str]:
        """Describe the rule that a step breaks, given the bits that were set before it."""
        kind, place = code & KIND_MASK, code & ~KIND_MASK
        if bits >> kind & 1:
            return FindingKind.DUPLICATE, f"{unpack(code)} stands twice"
        if kind in RETENTION_KINDS and bits & _GRADIENT:
            backward = BWD if bits >> BWD & 1 else BWD_INPUT
            return FindingKind.ORDER, f"{unpack(code)} stands behind {unpack(place | backward)}"
        if kind in RETENTION_KINDS:
            other = OFFLOAD if kind == RECOMPUTE else RECOMPUTE
            text = f"{unpack(code)} and {unpack(place | other)} are of one microbatch"
            return FindingKind.RETENTION, text
        if bits & (1 << BWD | _SPLIT):
            return FindingKind.DUPLICATE, f"{unpack(code)} repeats a backward"
        return FindingKind.ORDER, f"{unpack(code)} stands before {unpack(place | RELOAD)}"

    def _why_unneeded(self, kind: int, stage: int) -> str:
        if FWD_SEND <= kind <= BWD_RECV:
            if self._flow.peer[kind][stage] < 0:
                return "has no other rank to talk to"
            if not self._communication:
                return "is a message of a schedule that must have none"
        return "belongs to a backward of a schedule that must have none"

    def _all_rules(self) -> list[dict[int, _Rule]]:
        rules: list[dict[int, _Rule]] = [{} for _ in self._schedule.steps]
        optional = [] if self._forward_only else sorted(RETENTION_KINDS)
        for stage, rank in enumerate(self._schedule.stage_to_rank):
            for kind in [*self._expected(stage), *optional]:
                rules[rank][encode(kind, stage)] = self._rule(kind, stage, rank)
        return rules

    def _expected(self, stage: int) -> list[int]:
        """Return the kinds of steps that a stage must have, one of B and of I and W."""
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
                bits | kept | (bits >> BWD & 1 or bits >> BWD_INPUT & 1) * _GRADIENT
                for bits in (full, split)
                for kept in (0, 1 << RECOMPUTE, _COPIES)
            }
            if complete.issuperset(cells):
                continue
            for microbatch, bits in enumerate(cells):
                if bits not in complete:
                    target = split if bits & _SPLIT else full
                    target |= _COPIES if bits & _COPIES else 0
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


def memory_findings(schedule: Schedule, costs: Costs, limit: float) -> Iterator[Finding]:
    """Yield for each rank that holds too much at once the first cell at which it does.

    What OFFLOAD moves counts as gone from then on: a rank short of memory waits for the copy.
    """
    num = schedule.num_microbatches
    table = costs.activation_memory(schedule.num_stages, num)
    for rank, row in enumerate(schedule.steps):
        codes = row.codes()
        if peak_memory(codes, table, num) <= limit * (1 + _ROUNDING):
            continue
        below, above = 0, len(codes)
        while above - below > 1:
            middle = (below + above) // 2
            fits = peak_memory(codes[:middle], table, num) <= limit * (1 + _ROUNDING)
            below, above = (middle, above) if fits else (below, middle)
        peak = peak_memory(codes[:above], table, num)
        text = f"activations ({peak:g}) must be <= memory_limit ({limit:g})"
        yield finding_at(FindingKind.MEMORY, text, rank, above - 1)
