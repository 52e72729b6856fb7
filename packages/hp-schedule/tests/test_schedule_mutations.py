"""Whatever is changed in a valid schedule: it is refused, or it computes the same.

The judge is `schedule_tracing`, which runs schedules on symbols and knows no rule of validation.
HP_SCHEDULE_MUTANTS says how many changes are judged both ways on five machines; `nox -s mutations`
tries 20,000 and prints a table. HP_SCHEDULE_EXHAUSTIVE=1 tries twenty times as many of the others.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from schedule_tracing import MACHINES, MessageMachine, Trace, trace

from hp_schedule import (
    ChannelModel,
    DeadlockError,
    FindingKind,
    MetaStep,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_offload,
    add_recompute,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    pair_overlap,
    simulate,
    validate,
    zero_bubble,
)
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_WEIGHT,
    FIRST_COMMUNICATION,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    OFFLOAD,
    RELOAD,
    RETENTION_KINDS,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    encode_overlap,
    halves,
    leaves,
    unpack,
)

_MUTANTS = int(os.environ.get("HP_SCHEDULE_MUTANTS", "150"))
_MUTATIONS = 24_000 * (20 if os.environ.get("HP_SCHEDULE_EXHAUSTIVE") == "1" else 1)


def _rows(*rows: str, stage_to_rank: list[int], num_microbatches: int) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=stage_to_rank,
        num_microbatches=num_microbatches,
    )


_V_SHAPE = _rows(
    "0F0 0F1 3F0 3I0 3F1 3W0 3B1 0B0 0I1 0W1",
    "1F0 2F0 1F1 2F1 2B0 1B0 2I1 1I1 2W1 1W1",
    stage_to_rank=[0, 1, 1, 0],
    num_microbatches=2,
)
# As a search leaves them: each stage and each kind of step with an order of its own.
_CHOSEN = _rows(
    "0F1 0F0 0F2 0I2 0I1 0W2 0I0 0W1 0F3 0I3 0W0 0W3",
    "1F0 1F1 1I1 1F2 1I2 1W1 1I0 1W0 1F3 1I3 1W3 1W2",
    stage_to_rank=[0, 1],
    num_microbatches=4,
)
_OVERLAPS = _rows(
    "0F0 0F1 0F2 (0B0;0F3)OVERLAP_B_F 0B1 0B2 0B3",
    "1F0 (1F1;1B0)OVERLAP_F_B (1B1;1F2)OVERLAP_B_F (1F3;1I2)OVERLAP_F_B 1B3 1W2",
    stage_to_rank=[0, 1],
    num_microbatches=4,
)
_SHARDED = add_fsdp_reduce_grad(
    add_fsdp_unshard_reshard(
        interleaved_1f1b(2, num_microbatches=3, num_stages_per_rank=3), max_active_stages=2
    )
)
# Half of what each stage keeps is run again, a quarter copied away.
_PLACES = [(stage, microbatch) for stage in range(6) for microbatch in range(5)]


def _retaining(schedule: Schedule) -> Schedule:
    there = [
        (stage, microbatch)
        for stage, microbatch in _PLACES
        if stage < schedule.num_stages and microbatch < schedule.num_microbatches
    ]
    return add_offload(add_recompute(schedule, there[::2]), there[1::4])


_ORIGINALS = {
    "gpipe": gpipe(3, num_microbatches=3),
    "1f1b": one_f_one_b(4, num_microbatches=6),
    "short": one_f_one_b(4, num_microbatches=2),
    "interleaved": interleaved_1f1b(2, num_microbatches=5),
    "one_rank": interleaved_1f1b(1, num_microbatches=3),
    "zero_bubble": zero_bubble(3, num_microbatches=5),
    "interleaved_zero_bubble": interleaved_zero_bubble(2, num_microbatches=3),
    "v_shape": _V_SHAPE,
    "chosen orders": _CHOSEN,
    "overlaps": _OVERLAPS,
    "forward_only": forward_only(3, num_microbatches=3),
    "sharded": _SHARDED,
    "retaining": _retaining(interleaved_zero_bubble(2, num_microbatches=3)),
    "retaining pairs": _retaining(pair_overlap(one_f_one_b(3, num_microbatches=5))),
    "retaining, sharded": _retaining(_SHARDED),
}


def _swap(row: list[int], _schedule: Schedule, rng: random.Random) -> None:
    index, other = rng.randrange(len(row)), rng.randrange(len(row))
    row[index], row[other] = row[other], row[index]


def _drop(row: list[int], _schedule: Schedule, rng: random.Random) -> None:
    del row[rng.randrange(len(row))]


def _duplicate(row: list[int], _schedule: Schedule, rng: random.Random) -> None:
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))


def _retarget(row: list[int], schedule: Schedule, rng: random.Random) -> None:
    """Give a step, or half an overlap, another stage and microbatch."""
    index = rng.randrange(len(row))
    code = row[index]
    stage, microbatch = rng.randrange(schedule.num_stages), rng.randrange(schedule.num_microbatches)
    if code & KIND_MASK >= FIRST_OVERLAP:
        parts = list(halves(code))
        changed = rng.randrange(2)
        parts[changed] = encode(parts[changed] & KIND_MASK, stage, microbatch)
        row[index] = encode_overlap(*parts)
    else:
        fsdp = code & KIND_MASK >= FIRST_FSDP
        row[index] = encode(code & KIND_MASK, stage, 0 if fsdp else microbatch)


def _retype(row: list[int], _schedule: Schedule, rng: random.Random) -> None:
    index = rng.randrange(len(row))
    kind, code = rng.randrange(FIRST_OVERLAP), row[index]
    microbatch = 0 if kind >= FIRST_FSDP else code >> MICROBATCH_SHIFT & MICROBATCH_MASK
    row[index] = encode(kind, code >> STAGE_SHIFT & STAGE_MASK, microbatch)


_WAYS = (_swap, _swap, _drop, _duplicate, _retarget, _retype)


def _mutate(schedule: Schedule, rng: random.Random) -> Schedule:
    rows = [row.codes() for row in schedule.steps]
    rng.choice(_WAYS)(rng.choice([row for row in rows if row]), schedule, rng)
    return schedule.with_rows(rows)


def _meaning(found: Trace) -> object:
    """Return what a schedule computes; gradients are sums, their order is free."""
    grads = {stage: Counter(values) for stage, values in found.weight_grads.items()}
    return found.outputs, grads, found.reduced, found.gathered


@pytest.mark.parametrize("name", _ORIGINALS)
def test_every_mutation_is_refused_or_computes_the_same(name: str) -> None:
    rng = random.Random(name)
    original = add_send_recv(_ORIGINALS[name])
    validate(original).raise_if_failed()
    meaning = _meaning(trace(original))
    share = -(-_MUTATIONS // len(_ORIGINALS))
    accepted = 0
    for _ in range(share):
        mutated = _mutate(original, rng)
        report = validate(
            mutated,
            forward_only=original.is_forward_only,
            communication=original.has_communication,
        )
        if report:
            accepted += 1
            assert _meaning(trace(mutated)) == meaning
            if accepted % 8 == 0:
                simulate(mutated, channels="rank", blocking=mutated.has_communication)
    # Swapping two equal steps, or two that do not depend on each other, changes nothing.
    assert share * 0.005 < accepted < share * 0.5


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v_shape", "zero_bubble"])
def test_the_proof_and_the_simulator_agree_on_deadlocks(name: str) -> None:
    rng = random.Random(name)
    original = add_send_recv(_ORIGINALS[name])
    outcomes: Counter[tuple[str, bool]] = Counter()
    for _ in range(150):
        mutated = original
        for _ in range(rng.randrange(1, 4)):
            rows = [row.codes() for row in mutated.steps]
            row = rng.choice(rows)
            index = rng.randrange(len(row))
            row.insert(max(0, index - rng.randrange(1, 9)), row.pop(index))
            mutated = original.with_rows(rows)
        for channels in ("edge", "pair", "rank"):
            found = validate(mutated, channels=channels).findings
            if not found or found[0].kind is FindingKind.DEADLOCK:
                outcomes[channels, not found] += 1
                assert _runs(mutated, channels) == (not found)
    assert all(outcomes[channels, False] for channels in ("pair", "rank"))
    assert all(outcomes[channels, True] for channels in ("edge", "pair", "rank"))


def _runs(schedule: Schedule, channels: ChannelModel) -> bool:
    try:
        simulate(schedule, channels=channels)
    except DeadlockError:
        return False
    return True


# Wholesale changes: what a pass that was forgotten, or a broken one, leaves behind.


def _without(schedule: Schedule, lost: Callable[[int, int], bool]) -> Schedule:
    """Return a schedule without the steps of which `lost(rank, code)` is true."""
    return schedule.with_rows(
        [code for code in row.codes() if code < 0 or not lost(rank, code)]
        for rank, row in enumerate(schedule.steps)
    )


def _stage(code: int) -> int:
    return code >> STAGE_SHIFT & STAGE_MASK


def _lose_kinds_of_a_stage(schedule: Schedule, rng: random.Random) -> Schedule:
    kinds = rng.choice([{FSDP_UNSHARD, FSDP_RESHARD}, *({kind} for kind in schedule.kinds)])
    if rng.random() < 0.25:
        kinds = {FSDP_UNSHARD, FSDP_RESHARD, FSDP_REDUCE_GRAD}
    stage = rng.randrange(schedule.num_stages)
    return _without(schedule, lambda _, code: code & KIND_MASK in kinds and _stage(code) == stage)


def _lose_kinds(schedule: Schedule, rng: random.Random) -> Schedule:
    kinds = {rng.choice(sorted(schedule.kinds))}
    if schedule.gathered_stages is not None and rng.random() < 0.5:
        # Where it is not said which stages are sharded, none may be: that is no mutant then.
        kinds = {FSDP_UNSHARD, FSDP_RESHARD}
    return _without(schedule, lambda _, code: code & KIND_MASK in kinds)


def _lose_an_edge(schedule: Schedule, rng: random.Random) -> Schedule:
    edge = rng.choice(schedule.edges) if schedule.edges else (0, 0)

    def lost(rank: int, code: int) -> bool:
        if not FIRST_COMMUNICATION <= code & KIND_MASK < FIRST_FSDP:
            return False
        step = unpack(code)
        onward = step.type.value in {"SEND_F", "RECV_B"}
        other = (schedule.downstream if onward else schedule.upstream)[step.stage_index or 0]
        peer = schedule.stage_to_rank[other]
        return ((rank, peer) if "SEND" in step.type.value else (peer, rank)) == edge

    return _without(schedule, lost)


def _lose_a_microbatch(schedule: Schedule, rng: random.Random) -> Schedule:
    microbatch = rng.randrange(schedule.num_microbatches)
    shifted = microbatch << MICROBATCH_SHIFT
    field = MICROBATCH_MASK << MICROBATCH_SHIFT
    return _without(
        schedule,
        lambda _, code: (
            not FIRST_FSDP <= code & KIND_MASK < FIRST_OVERLAP
            and all(leaf & field == shifted for leaf in leaves(code))
        ),
    )


def _lose_a_row(schedule: Schedule, rng: random.Random) -> Schedule:
    empty = rng.randrange(schedule.num_ranks)
    return _without(schedule, lambda rank, _: rank == empty)


def _exchange_rows(schedule: Schedule, rng: random.Random) -> Schedule:
    rows = [row.codes() for row in schedule.steps]
    rng.shuffle(rows)
    return schedule.with_rows(rows)


def _move(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let steps stand elsewhere in their row, or one in another."""
    rows = [row.codes() for row in schedule.steps]
    for _ in range(rng.randrange(1, 4)):
        row = rng.choice([row for row in rows if row])
        index = rng.randrange(len(row))
        step = row.pop(index)
        if rng.random() < 0.1:
            row = rng.choice(rows)
            index = rng.randrange(len(row) + 1)
        row.insert(max(0, index + rng.randrange(-6, 7)), step)
    return schedule.with_rows(rows)


def _split(schedule: Schedule, rng: random.Random) -> Schedule:
    """Split a backward in two, or join its halves at the place of one."""
    rows = [row.codes() for row in schedule.steps]
    row = rng.choice(rows)
    whole = [i for i, code in enumerate(row) if code & KIND_MASK == BWD]
    parts = [i for i, code in enumerate(row) if code & KIND_MASK == BWD_INPUT]
    if whole and (not parts or rng.random() < 0.5):
        index = rng.choice(whole)
        place = row[index] & ~KIND_MASK
        row[index] = place | BWD_INPUT
        row.insert(rng.randrange(max(0, index - 2), len(row) + 1), place | BWD_WEIGHT)
    elif parts:
        index = rng.choice(parts)
        place = row[index] & ~KIND_MASK
        row[index] = place | BWD
        if rng.random() < 0.8 and place | BWD_WEIGHT in row:
            row.remove(place | BWD_WEIGHT)
    return schedule.with_rows(rows)


def _pair(schedule: Schedule, rng: random.Random) -> Schedule:
    """Make one step of a forward and a backward, side by side or not."""
    rows = [row.codes() for row in schedule.steps]
    row = rng.choice(rows)
    ends = [i for i, code in enumerate(row) if code & KIND_MASK in {FWD, BWD, BWD_INPUT}]
    pairs = [
        (i, j)
        for i, j in zip(ends, ends[rng.randrange(1, 3) :], strict=False)
        if (row[i] & KIND_MASK == FWD) != (row[j] & KIND_MASK == FWD)
    ]
    if pairs:
        first, second = rng.choice(pairs)
        row[first] = encode_overlap(row[first], row.pop(second))
    return schedule.with_rows(rows)


def _retain(schedule: Schedule, rng: random.Random) -> Schedule:
    """Run something again or copy it, perhaps only there or only back."""
    rows = [row.codes() for row in schedule.steps]
    row = rng.choice(rows)
    stage, microbatch = rng.randrange(schedule.num_stages), rng.randrange(schedule.num_microbatches)
    kinds = rng.choice([*([kind] for kind in sorted(RETENTION_KINDS)), [OFFLOAD, RELOAD]])
    at = rng.randrange(len(row) + 1)
    for kind in kinds:
        row.insert(at, encode(kind, stage, microbatch))
        at = rng.randrange(at + 1, len(row) + 1)
    return schedule.with_rows(rows)


_WHOLESALE = (
    _mutate,
    _mutate,
    _mutate,
    _move,
    _move,
    _split,
    _pair,
    _retain,
    _retain,
    _lose_kinds_of_a_stage,
    _lose_kinds,
    _lose_an_edge,
    _lose_a_microbatch,
    _lose_a_row,
    _exchange_rows,
)
_UNSAID = replace(_SHARDED, gathered_stages=None, reduced_stages=None)
_JUDGED = {
    **{name: add_send_recv(schedule) for name, schedule in _ORIGINALS.items()},
    "sharded, not said": add_send_recv(_UNSAID),
    "two sharded of four": add_send_recv(
        add_fsdp_unshard_reshard(
            add_fsdp_reduce_grad(interleaved_1f1b(2, num_microbatches=2), stages=[0, 3]),
            stages=[0, 3],
        )
    ),
    "reduced, not sharded": add_fsdp_reduce_grad(add_send_recv(zero_bubble(3, num_microbatches=3))),
    "sharded, forward only": add_fsdp_unshard_reshard(
        add_send_recv(forward_only(2, num_microbatches=2, num_stages_per_rank=2))
    ),
}


def _sharded_stages(original: Schedule) -> Iterable[int]:
    if original.gathered_stages is not None:
        return original.gathered_stages
    return range(original.num_stages) if FSDP_UNSHARD in original.kinds else ()


def _computes(schedule: Schedule, machine: MessageMachine, *, sharded: Iterable[int]) -> object:
    """Return what a schedule computes on a machine, None if it does not come to its end."""
    try:
        return _meaning(trace(schedule, machine, sharded=sharded))
    except (DeadlockError, KeyError):
        return None


def _accepted(mutant: Schedule, original: Schedule, channels: ChannelModel | None) -> bool:
    """Whether validation finds nothing, and nothing lacking, in what is to do the original's."""
    return validate(
        mutant,
        forward_only=original.is_forward_only,
        communication=original.has_communication,
        channels=channels,
    ).is_runnable


_CHANNELS: dict[str, ChannelModel | None] = {
    "rendezvous": None,
    "edge": "edge",
    "pair": "pair",
    "rank": "rank",
}


def _compare(mutant: Schedule, original: Schedule, meaning: object) -> dict[str, tuple[bool, bool]]:
    """Return for each machine whether validation accepts a mutant, and whether it is right to.

    Validation has no buffered machine. What it accepts without a word about channels must run on
    it; what it refuses even for a communicator per edge cannot.
    """
    sharded = _sharded_stages(original)
    right = {
        name: _computes(mutant, machine, sharded=sharded) == meaning
        for name, machine in MACHINES.items()
    }
    found = {
        name: (_accepted(mutant, original, channels), right[name])
        for name, channels in _CHANNELS.items()
    }
    bounds = (found["rendezvous"][0], right["buffered"], found["edge"][0])
    return found | {"buffered": (sorted(bounds)[1], right["buffered"])}


def _mutant(original: Schedule, rng: random.Random) -> tuple[str, Schedule]:
    """Return what was changed, and a schedule that differs."""
    while True:
        way = rng.choice(_WHOLESALE)
        mutant = way(original, rng)
        if mutant != original:
            return way.__name__, mutant


def test_validation_accepts_exactly_what_runs_and_computes_the_same_on_five_machines() -> None:
    counts: Counter[tuple[str, bool, bool]] = Counter()
    wrong: list[str] = []
    names = list(_JUDGED)
    meanings = {
        name: {
            machine: _computes(original, MACHINES[machine], sharded=_sharded_stages(original))
            for machine in MACHINES
        }
        for name, original in _JUDGED.items()
    }
    for name, found in meanings.items():
        assert found["rendezvous"] is not None, name
        assert all(found[machine] == found["rendezvous"] for machine in MACHINES), name
        assert _accepted(_JUDGED[name], _JUDGED[name], None), name
    for number in range(_MUTANTS):
        rng = random.Random(number)
        name = names[number % len(names)]
        original = _JUDGED[name]
        way, mutant = _mutant(original, rng)
        meaning = meanings[name]["rendezvous"]
        for machine, (accepted, right) in _compare(mutant, original, meaning).items():
            counts[machine, accepted, right] += 1
            if accepted != right:
                verdict = "missed" if accepted else "false alarm"
                wrong.append(f"{verdict}: {name}, {way}, seed {number}, {machine}")
    sys.stdout.write(_table(counts))
    assert not wrong, wrong[:20]
    assert counts["rendezvous", True, True] > _MUTANTS * 0.02
    assert counts["rendezvous", False, False] > _MUTANTS * 0.5


def _table(counts: Counter[tuple[str, bool, bool]]) -> str:
    lines = [f"{_MUTANTS} mutants of {len(_JUDGED)} schedules"]
    lines.append("machine     refused  accepted  missed  false alarms")
    for machine in MACHINES:
        refused, accepted = counts[machine, False, False], counts[machine, True, True]
        missed, alarms = counts[machine, True, False], counts[machine, False, True]
        lines.append(f"{machine:10}  {refused:7}  {accepted:8}  {missed:6}  {alarms:12}")
    return "\n" + "\n".join(lines) + "\n"


def test_each_machine_lets_more_run_than_the_one_before() -> None:
    """So that the verdicts of the five differ somewhere, and not only in their names."""
    original = _JUDGED["interleaved"]
    runs: Counter[str] = Counter()
    for number in range(300):
        mutant = _move(original, random.Random(number))
        for name, machine in MACHINES.items():
            runs[name] += _computes(mutant, machine, sharded=()) is not None
    assert runs["rendezvous"] < runs["buffered"] < runs["edge"]
    assert runs["rendezvous"] <= runs["rank"] <= runs["pair"] < runs["edge"]
    assert runs["rank"] < runs["edge"]
