"""Whatever single thing is changed in a valid schedule: it is refused, or it computes the same.

HP_SCHEDULE_EXHAUSTIVE=1 tries twenty times as many changes.
"""

import os
import random
from collections import Counter

import pytest

from hp_schedule import (
    ChannelModel,
    DeadlockError,
    FindingKind,
    MetaStep,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    validate,
)
from hp_schedule.generators import interleaved_zero_bubble, zero_bubble
from hp_schedule.packing import (
    FIRST_FSDP,
    FIRST_OVERLAP,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    encode_overlap,
    halves,
)
from hp_schedule.tracing import Trace, trace

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
_OVERLAPS = _rows(
    "0F0 0F1 0F2 (0B0;0F3)OVERLAP_B_F 0B1 0B2 0B3",
    "1F0 (1F1;1B0)OVERLAP_F_B (1B1;1F2)OVERLAP_B_F (1F3;1I2)OVERLAP_F_B 1B3 1W2",
    stage_to_rank=[0, 1],
    num_microbatches=4,
)
_ORIGINALS = {
    "gpipe": gpipe(3, num_microbatches=3),
    "1f1b": one_f_one_b(4, num_microbatches=6),
    "short": one_f_one_b(4, num_microbatches=2),
    "interleaved": interleaved_1f1b(2, num_microbatches=5),
    "one_rank": interleaved_1f1b(1, num_microbatches=3),
    "zero_bubble": zero_bubble(3, num_microbatches=5),
    "interleaved_zero_bubble": interleaved_zero_bubble(2, num_microbatches=3),
    "v_shape": _V_SHAPE,
    "overlaps": _OVERLAPS,
    "forward_only": forward_only(3, num_microbatches=3),
    "sharded": add_fsdp_reduce_grad(
        add_fsdp_unshard_reshard(
            interleaved_1f1b(2, num_microbatches=3, num_stages_per_rank=3), max_active_stages=2
        )
    ),
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
    return found.outputs, grads, found.reduced


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
