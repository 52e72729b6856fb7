"""The rules that can be seen in the rows alone, without running them."""

from collections.abc import Iterator

from hp_schedule.dataflow import Dataflow, dataflow
from hp_schedule.packing import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    BWD_WEIGHT,
    FIRST_COMMUNICATION,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    leaves,
    unpack,
)
from hp_schedule.schedule import Schedule
from hp_schedule.validation.report import Finding, FindingKind

# What has been seen of a (stage, microbatch); bit k is the step of kind k.
_BACKWARD_BITS = 1 << BWD | 1 << BWD_INPUT
_WEIGHT_BITS = 1 << BWD | 1 << BWD_WEIGHT
_SPLIT_BITS = 1 << BWD_INPUT | 1 << BWD_WEIGHT

Problem = tuple[FindingKind, str] | None


class RowCheck:
    """Walks every row once.

    Args:
        schedule: The schedule.
        forward_only: Whether backward steps must be absent; otherwise all must be there.
        communication: Whether messages must be there; otherwise none may be.

    Attributes:
        sends: For each directed edge the values sent, in order.
        receives: For each directed edge the values received with the cell of each, in order.
    """

    def __init__(self, schedule: Schedule, *, forward_only: bool, communication: bool) -> None:
        self.sends: dict[tuple[int, int], list[int]] = {edge: [] for edge in schedule.edges}
        self.receives: dict[tuple[int, int], list[tuple[int, int]]] = {
            edge: [] for edge in schedule.edges
        }
        self._schedule = schedule
        self._flow: Dataflow = dataflow(schedule)
        self._forward_only = forward_only
        self._communication = communication
        self._seen = [0] * (schedule.num_stages * schedule.num_microbatches)
        self._fsdp = _FsdpState(schedule)

    def findings(self) -> Iterator[Finding]:
        """Yield every broken rule, row by row, then what is missing."""
        place = self._schedule.stage_to_rank
        for rank, row in enumerate(self._schedule.steps):
            for position, cell in enumerate(row.codes()):
                if cell < 0:
                    continue
                for code in leaves(cell):
                    if place[code >> STAGE_SHIFT & STAGE_MASK] != rank:
                        where = place[code >> STAGE_SHIFT & STAGE_MASK]
                        text = f"{unpack(code)} belongs to rank {where}"
                        yield _finding(FindingKind.PLACEMENT, text, rank, position)
                    elif (problem := self._check(code, rank, position)) is not None:
                        kind, text = problem
                        yield _finding(kind, text, rank, position)
        yield from self._missing()
        yield from self._message_order()

    def _check(self, code: int, rank: int, position: int) -> Problem:
        """Check one step against what stood before it in its row, and remember it."""
        kind = code & KIND_MASK
        stage = code >> STAGE_SHIFT & STAGE_MASK
        if FIRST_FSDP <= kind < FIRST_OVERLAP:
            return self._fsdp.check(kind, stage)
        microbatch = code >> MICROBATCH_SHIFT
        index = stage * self._schedule.num_microbatches + microbatch
        seen = self._seen[index]
        self._seen[index] = seen | 1 << kind
        if seen >> kind & 1:
            return FindingKind.DUPLICATE, f"{unpack(code)} stands twice"
        if kind >= FIRST_COMMUNICATION:
            return self._check_message(code, seen, rank, position)
        return self._check_compute(code, seen) or self._fsdp.check(kind, stage)

    def _check_compute(self, code: int, seen: int) -> Problem:
        kind = code & KIND_MASK
        if kind == FWD:
            return self._check_input(code, seen, FWD_RECV)
        forward = code & ~KIND_MASK | FWD
        if not seen >> FWD & 1:
            return _before(code, forward)
        if seen & (_SPLIT_BITS if kind == BWD else 1 << BWD):
            return FindingKind.DUPLICATE, f"{unpack(code)} repeats a backward"
        if kind != BWD_WEIGHT:
            return self._check_input(code, seen, BWD_RECV)
        return None if seen >> BWD_INPUT & 1 else _before(code, code & ~KIND_MASK | BWD_INPUT)

    def _check_input(self, code: int, seen: int, receive: int) -> Problem:
        """Check that the value from another stage was received, or made on this rank."""
        schedule = self._schedule
        stage = code >> STAGE_SHIFT & STAGE_MASK
        microbatch = code >> MICROBATCH_SHIFT
        other = (schedule.upstream if receive == FWD_RECV else schedule.downstream)[stage]
        if other < 0:
            return None
        if self._flow.peer[receive][stage] >= 0:
            missing = self._communication and not seen >> receive & 1
            return _before(code, encode(receive, stage, microbatch)) if missing else None
        made = 1 << FWD if receive == FWD_RECV else _BACKWARD_BITS
        if self._seen[other * schedule.num_microbatches + microbatch] & made:
            return None
        return _before(code, encode(FWD if receive == FWD_RECV else BWD, other, microbatch))

    def _check_message(self, code: int, seen: int, rank: int, position: int) -> Problem:
        kind = code & KIND_MASK
        peer = self._flow.peer[kind][code >> STAGE_SHIFT & STAGE_MASK]
        if peer < 0:
            return FindingKind.UNNEEDED, f"{unpack(code)} has no other rank to talk to"
        if kind in {FWD_RECV, BWD_RECV}:
            self.receives[peer, rank].append((self._flow.value_written(code), position))
            return None
        self.sends[rank, peer].append(self._flow.value_read(code))
        if not seen & (1 << FWD if kind == FWD_SEND else _BACKWARD_BITS):
            return _before(code, code & ~KIND_MASK | (FWD if kind == FWD_SEND else BWD))
        return None

    def _missing(self) -> Iterator[Finding]:
        schedule, flow = self._schedule, self._flow
        for stage, rank in enumerate(schedule.stage_to_rank):
            wanted = [FWD]
            wanted += [] if self._forward_only else [BWD]
            if self._communication:
                messages = [FWD_RECV, FWD_SEND]
                messages += [] if self._forward_only else [BWD_RECV, BWD_SEND]
                wanted += [kind for kind in messages if flow.peer[kind][stage] >= 0]
            full = sum(1 << kind for kind in wanted)
            split = full & ~(1 << BWD) | _SPLIT_BITS
            complete = {full} if self._forward_only else {full, split}
            start = stage * schedule.num_microbatches
            for microbatch in range(schedule.num_microbatches):
                seen = self._seen[start + microbatch]
                if seen not in complete:
                    target = split if seen & _SPLIT_BITS else full
                    yield from _absent(target & ~seen, stage, microbatch, rank)

    def _message_order(self) -> Iterator[Finding]:
        for edge, receives in self.receives.items():
            for sent, (received, position) in zip(self.sends[edge], receives, strict=False):
                if sent != received:
                    source, destination = edge
                    receive = self._schedule.steps[destination][position]
                    text = f"{receive} is not the next message that rank {source} sends"
                    yield _finding(FindingKind.MESSAGE_ORDER, text, destination, position)
                    break


class _FsdpState:
    """Which stages have their parameters; stages that are never unsharded are not managed."""

    def __init__(self, schedule: Schedule) -> None:
        self._sharded = {
            code >> STAGE_SHIFT & STAGE_MASK: True
            for row in schedule.steps
            for code in row.codes()
            if code >= 0 and code & KIND_MASK == FSDP_UNSHARD
        }
        self._reduced = [False] * schedule.num_stages

    def check(self, kind: int, stage: int) -> Problem:
        problem = None
        if kind == FSDP_UNSHARD:
            if self._sharded.get(stage) is False:
                problem = "is unsharded already"
            self._sharded[stage] = False
        elif kind == FSDP_RESHARD:
            if self._sharded.get(stage, True):
                problem = "is not unsharded"
            self._sharded[stage] = True
        elif kind == FSDP_REDUCE_GRAD:
            if self._reduced[stage]:
                problem = "reduces its gradients twice"
            self._reduced[stage] = True
        elif self._sharded.get(stage, False):
            problem = "computes while its parameters are sharded"
        elif self._reduced[stage] and _WEIGHT_BITS >> kind & 1:
            problem = "accumulates gradients after they were reduced"
        return None if problem is None else (FindingKind.FSDP, f"stage {stage} {problem}")


def _before(code: int, needed: int) -> tuple[FindingKind, str]:
    return FindingKind.ORDER, f"{unpack(code)} stands before {unpack(needed)}"


def _absent(bits: int, stage: int, microbatch: int, rank: int) -> Iterator[Finding]:
    for kind in (FWD, BWD, BWD_INPUT, BWD_WEIGHT, FWD_SEND, FWD_RECV, BWD_SEND, BWD_RECV):
        if bits >> kind & 1:
            step = unpack(encode(kind, stage, microbatch))
            message = f"rank {rank}: {step} is missing"
            yield Finding(FindingKind.MISSING, message, rank, None)


def _finding(kind: FindingKind, text: str, rank: int, position: int) -> Finding:
    return Finding(kind, f"rank {rank}, cell {position}: {text}", rank, position)
