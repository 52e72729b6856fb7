"""What ranks do together is proven to fit, or the first fault is named by ranks, file and line."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hp_dry.cluster import Classes
from hp_dry.proof.order import prove, same_program
from hp_dry.proof.symmetry import Symmetry
from hp_dry.trace import (
    Collective,
    Event,
    HostMessage,
    HostWait,
    RecordEvent,
    Trace,
    WaitEvent,
    WaitWork,
)
from hp_dry.world.communicators import listed

SHAPE = (((4, 8), "bfloat16"),)
PAIRS = ((0, 1), (2, 3))


class Program:
    """Writes the trace of one rank, line by line."""

    def __init__(self, rank: int, families: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        size = 1 + max(rank for lists in families.values() for ranks in lists for rank in ranks)
        groups = {
            f + listed(own): own for f, lists in families.items() for own in lists if rank in own
        }
        self.trace = Trace(rank, size, groups, [], families)
        self.streams = {family: 1000 + number for number, family in enumerate(families)}
        self.line = 0

    def group(self, family: str) -> tuple[str, tuple[int, ...]]:
        """Name and ranks of this rank's group."""
        lists = self.trace.families[family]
        ranks = next(ranks for ranks in lists if self.trace.rank in ranks)
        return family + listed(ranks), ranks

    def add(self, event: Event) -> Event:
        """Write an event with a line of its own."""
        self.line += 1
        at = f"model.py:{self.line}"
        self.trace.events.append(replace(event, at=at, place=f"step 1, line {self.line}"))
        return event

    def start(self, family: str, op: str = "all_reduce", **values: object) -> int:
        """Start an operation on the communicator's stream; return its work."""
        work = len(self.trace.events) + 1
        usual: dict[str, object] = {
            "issuer": 0,
            "stream": self.streams[family],
            "inputs": SHAPE,
            "outputs": SHAPE,
            "reads": (),
            "writes": (),
            "detail": "sum" if op == "all_reduce" else "",
        }
        group = self.group(family)[0]
        self.add(Collective(op, group, work=work, **{**usual, **values}))  # type: ignore[arg-type]
        return work

    def run(self, family: str, op: str = "all_reduce", **values: object) -> None:
        """Start an operation and let the stream wait for it."""
        self.wait(self.start(family, op, **values))

    def wait(self, work: int) -> None:
        """Let the stream wait for an operation."""
        self.add(WaitWork(work, 0))

    def send(self, family: str, peer: int, **values: object) -> int:
        """Start to send."""
        return self.start(family, "send", **{"peer": peer, "outputs": (), **values})

    def receive(self, family: str, peer: int, **values: object) -> int:
        """Start to receive."""
        return self.start(family, "recv", **{"peer": peer, "inputs": (), **values})

    def say(self, family: str, op: str = "all_gather", **values: object) -> None:
        """An operation of the hosts, which wait for it."""
        shapes = (((1,), "int64"),)
        self.add(HostMessage(op, self.group(family)[0], shapes, **values))  # type: ignore[arg-type]

    def read(self) -> None:
        """Have the host wait for the default stream."""
        self.add(HostWait("aten._local_scalar_dense", 0))


FAMILIES = {"world": ((0, 1, 2, 3),), "tp": PAIRS, "dp": ((0, 2), (1, 3))}


def traces_of(
    write: Callable[[Program], None], families: dict[str, tuple[tuple[int, ...], ...]] = FAMILIES
) -> list[Trace]:
    """The traces of all ranks, each of which `write` has written."""
    size = 1 + max(rank for lists in families.values() for ranks in lists for rank in ranks)
    programs = [Program(rank, families) for rank in range(size)]
    for program in programs:
        write(program)
    return [program.trace for program in programs]


def sound(program: Program) -> None:
    """A step: gathers, products of columns, messages both ways at once, a norm."""
    rank = program.trace.rank
    program.say("world", "new_group", detail="tp", waits=False)
    program.run("dp", "all_gather")
    program.run(
        "tp", "all_to_all", input_splits=(1, 3), output_splits=(1, 1) if rank % 2 == 0 else (3, 3)
    )
    work = program.start("dp", "reduce_scatter", detail="sum")
    other = program.group("tp")[1][1 - rank % 2]
    program.send("tp", other, batch=7)
    program.wait(program.receive("tp", other, batch=7))
    program.wait(work)
    program.say("world")
    program.run("world")
    program.read()


def test_a_sound_program_is_proven() -> None:
    assert prove(traces_of(sound)) == []


def skips(trace: Trace) -> None:
    del trace.events[1:3]


def changes(number: int, **values: object) -> Callable[[Trace], None]:
    def change(trace: Trace) -> None:
        trace.events[number] = replace(trace.events[number], **values)

    return change


def leaves(trace: Trace) -> None:
    del trace.events[-5:]


def drops_message(trace: Trace) -> None:
    del trace.events[6]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (skips, "operation", ["all_gather", "model.py:2 ", "reduce_scatter"]),
        (changes(1, inputs=(((4, 9), "bfloat16"),)), "shape", ["[4, 9]", "[4, 8]", "model.py:2 "]),
        (
            changes(1, inputs=(((4, 8), "float32"),)),
            "dtype",
            ["float32", "bfloat16", "model.py:2 "],
        ),
        (changes(1, op="broadcast", detail="root 0"), "operation", ["broadcast", "all_gather"]),
        (changes(3, input_splits=(2, 2)), "splits", ["model.py:4 ", "expects"]),
        (changes(5, detail="avg"), "reduction", ["avg", "sum", "model.py:6 "]),
        (drops_message, "message", ["no send for it", "model.py:8 "]),
        (changes(7, outputs=(((4, 7), "bfloat16"),)), "message", ["[4, 7]", "[4, 8]"]),
        (changes(0, detail="dp"), "groups", ["new_group", " dp at", " tp at", "model.py:1 "]),
        (leaves, "missing", ["nothing more", "model.py:11 "]),
    ],
)
def test_a_fault_of_one_rank_is_named(
    fault: Callable[[Trace], None], kind: str, words: Sequence[str]
) -> None:
    traces = traces_of(sound)
    fault(traces[1])
    found = prove(traces)
    assert kind in [problem.kind for problem in found], list(map(str, found))
    assert all(1 in problem.ranks for problem in found), list(map(str, found))
    told = next(str(problem) for problem in found if problem.kind == kind)
    assert all(word in told for word in words), told


def test_receives_in_another_order_are_found() -> None:
    other = (((2, 2), "float32"),)

    def write(program: Program) -> None:
        if program.trace.rank == 0:
            program.wait(program.send("tp", 1))
            program.wait(program.send("tp", 1, inputs=other))
        if program.trace.rank == 1:
            program.wait(program.receive("tp", 0, outputs=other))
            program.wait(program.receive("tp", 0))

    (problem,) = prove(traces_of(write))
    assert (problem.kind, problem.ranks) == ("message", (0, 1))
    assert problem.at == ("model.py:1", "model.py:1")


def test_a_cycle_over_two_communicators_is_found() -> None:
    """Each rank waits on its stream for one communicator before it starts on the other."""

    def write(program: Program) -> None:
        order = ("a", "b") if program.trace.rank == 0 else ("b", "a")
        for family in order:
            program.run(family)

    (problem,) = prove(traces_of(write, {"a": ((0, 1),), "b": ((0, 1),)}))
    assert (problem.kind, set(problem.ranks)) == ("deadlock", {0, 1})
    assert {"model.py:1", "model.py:3"} <= set(problem.at)
    assert "a[0,1]" in problem.text
    assert "b[0,1]" in problem.text
    assert "step 1, line" in problem.text


def test_operations_that_may_run_together_are_only_launched_in_another_order() -> None:
    def write(program: Program) -> None:
        order = ("a", "b") if program.trace.rank == 0 else ("b", "a")
        for work in [program.start(family) for family in order]:
            program.wait(work)

    traces = traces_of(write, {"a": ((0, 1),), "b": ((0, 1),)})
    (problem,) = prove(traces)
    assert problem.is_warning
    assert problem.kind == "launch order"
    assert problem.at == ("model.py:1", "model.py:1")
    assert prove(traces, launch_order_implicit=True) == []


@pytest.mark.parametrize("wait", ["read", "event", "synchronize"])
def test_a_host_that_waits_closes_a_cycle(wait: str) -> None:
    """Rank 0 reads the device before it says what rank 1 has to hear to start the operation."""

    def write(program: Program) -> None:
        if program.trace.rank == 1:
            program.say("b")
        program.run("a")
        if wait == "event":
            program.add(RecordEvent(1, 0))
            program.add(HostWait("Event.synchronize", -1, 1))
        else:
            program.add(HostWait("torch.cuda.synchronize", -1 if wait == "synchronize" else 0))
        if program.trace.rank == 0:
            program.say("b")

    (problem,) = prove(traces_of(write, {"a": ((0, 1),), "b": ((0, 1),)}))
    assert (problem.kind, set(problem.ranks)) == ("deadlock", {0, 1})
    assert "the host waits for the device" in problem.text
    assert "model.py:1" in problem.at


def test_a_stream_that_waits_for_an_event_closes_a_cycle() -> None:
    def write(program: Program) -> None:
        order = ("a", "b") if program.trace.rank == 0 else ("b", "a")
        work = program.start(order[0])
        program.add(WaitWork(work, 5))
        program.add(RecordEvent(9, 5))
        program.add(WaitEvent(9, 6))
        program.start(order[1], issuer=6)

    (problem,) = prove(traces_of(write, {"a": ((0, 1),), "b": ((0, 1),)}))
    assert problem.kind == "deadlock"


@pytest.mark.parametrize("batch", [-1, 3])
def test_two_ranks_that_send_first_wait_unless_it_is_one_batch(batch: int) -> None:
    def write(program: Program) -> None:
        other = 1 - program.trace.rank
        program.send("a", other, batch=batch)
        program.wait(program.receive("a", other, batch=batch))

    found = prove(traces_of(write, {"a": ((0, 1),)}))
    assert [problem.kind for problem in found] == (["deadlock"] if batch < 0 else [])


def ring(program: Program) -> None:
    """All ranks of a ring send to the next and receive from the one before."""
    _, ranks = program.group("cp")
    place = ranks.index(program.trace.rank)
    for _ in range(3):
        batch = program.line
        program.send("cp", ranks[(place + 1) % len(ranks)], batch=batch)
        program.receive("cp", ranks[place - 1], batch=batch)
        program.run("world")


def test_a_ring_of_one_class_is_proven_from_one_trace() -> None:
    families = {"world": (tuple(range(8)),), "cp": ((0, 1, 2, 3), (4, 5, 6, 7))}
    traces = traces_of(ring, families)
    assert prove(traces) == []
    assert prove(traces[:1], classes={0: range(8)}) == []
    assert same_program(traces[0], traces[6]) is None


def test_a_group_that_nobody_knows_is_asked_for() -> None:
    (trace, *_) = traces_of(lambda program: program.run("tp"))
    trace.families = {"tp": ((0, 1),)}
    with pytest.raises(ValueError, match=r"rank 2 must be in a group tp .* process of its own"):
        prove([trace], classes={0: range(4)})


def test_two_ranks_of_a_class_are_compared() -> None:
    traces = traces_of(lambda program: program.run("dp", "all_gather"))
    assert same_program(traces[0], traces[3]) is None
    changes(0, inputs=(((1, 8), "bfloat16"),))(traces[3])
    told = same_program(traces[0], traces[3])
    assert told is not None
    assert "rank 3: all_gather bfloat16[1, 8]" in told


STAGES, WIDTH, SIZE = 16, 8, 1024


def large(program: Program) -> None:
    """1,024 ranks, 16 stages, 8 experts' ranks: messages of stages, exchanges, a norm."""
    rank = program.trace.rank
    _, ranks = program.group("pp")
    stage = ranks.index(rank)
    for _ in range(16):
        if stage:
            program.wait(program.receive("pp", ranks[stage - 1]))
        for _ in range(8):
            program.run("ep", "all_to_all")
            program.run("dp", "all_gather")
        if stage < STAGES - 1:
            program.wait(program.send("pp", ranks[stage + 1]))
    program.say("world")
    program.run("world")


def test_1024_ranks_of_16_classes_are_proven_from_16_traces() -> None:
    per_stage = SIZE // STAGES
    families = {
        "world": (tuple(range(SIZE)),),
        "pp": tuple(tuple(range(first, SIZE, per_stage)) for first in range(per_stage)),
        "ep": tuple(tuple(range(first, first + WIDTH)) for first in range(0, SIZE, WIDTH)),
        "dp": tuple(
            tuple(range(stage * per_stage + first, (stage + 1) * per_stage, WIDTH))
            for stage in range(STAGES)
            for first in range(WIDTH)
        ),
    }
    traces = []
    for stage in range(STAGES):
        program = Program(stage * per_stage, families)
        large(program)
        traces.append(program.trace)
    classes = {t.rank: range(t.rank, t.rank + per_stage) for t in traces}
    assert prove(traces, classes=classes) == []
    known = Classes.of(classes, world_size=SIZE)
    symmetry = Symmetry({trace.rank: trace for trace in traces}, known)
    assert len(symmetry.example) == STAGES  # as many are followed, not 1,024
    del traces[5].events[-6]  # the last send of a stage
    del traces[5].events[-5]
    (problem, *_) = prove(traces, classes=classes)
    assert problem.kind == "message"
    assert set(problem.ranks) == {5 * per_stage, 6 * per_stage}


# Random programs

OPS = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
LAYOUT = {
    "world": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "rows": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "columns": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "pairs": ((0, 1), (2, 3), (4, 5), (6, 7)),
}
Step = tuple[str, str, int, str]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(sorted(LAYOUT)),
        st.sampled_from(["message", "host", *OPS]),
        st.integers(1, 4),
        st.sampled_from(["wait", "later", "read"]),
    ),
    min_size=1,
    max_size=12,
)


def play(program: Program, steps: Sequence[Step]) -> None:
    """One order of operations for all ranks is sound, whoever waits for what and when."""
    later = []
    for family, op, length, how in steps:
        shapes = (((length,), "float32"),)
        _, ranks = program.group(family)
        if op == "host":
            program.say(family)
            continue
        if op == "message":
            place = ranks.index(program.trace.rank)
            batch = len(program.trace.events) + 100
            program.send(family, ranks[(place + 1) % len(ranks)], inputs=shapes, batch=batch)
            work = program.receive(family, ranks[place - 1], outputs=shapes, batch=batch)
        else:
            work = program.start(family, op, inputs=shapes, outputs=shapes)
        later.append(work)
        if how != "later":
            program.wait(work)
        if how == "read":
            program.read()
    for work in later:
        program.wait(work)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_random_sound_programs_are_proven(steps: list[Step]) -> None:
    traces = traces_of(lambda program: play(program, steps), LAYOUT)
    assert prove(traces) == []
    assert prove(traces[:1], classes={0: range(8)}) == []


def simulate(traces: Sequence[Trace]) -> bool:
    """Whether ranks come to the end, found by stepping through them: another way than `prove`'s.

    A rank gets past an operation when all members have come to theirs of that number; hosts do not
    run ahead, which is stricter than NCCL and equal to it where every operation is waited for.
    """
    at = [0] * len(traces)
    while True:
        moved = False
        for rank, trace in enumerate(traces):
            if at[rank] == len(trace.events):
                continue
            event = trace.events[at[rank]]
            if not isinstance(event, Collective | HostMessage):
                at[rank] += 1
                moved = True
                continue
            members = trace.groups[event.group]
            here = [
                traces[m].events[at[m]] if at[m] < len(traces[m].events) else None for m in members
            ]
            if all(
                isinstance(e, Collective | HostMessage)
                and type(e) is type(event)
                and e.group == event.group
                and (e.op, getattr(e, "inputs", ())) == (event.op, getattr(event, "inputs", ()))
                for e in here
            ):
                for m in members:
                    at[m] += 1
                moved = True
        if not moved:
            return all(at[rank] == len(trace.events) for rank, trace in enumerate(traces))


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(sorted(LAYOUT)),
            st.sampled_from(["host", *OPS]),
            st.integers(1, 2),
            st.just("read"),
        ),
        min_size=2,
        max_size=8,
    ),
    seed=st.integers(0, 10**6),
)
def test_one_random_change_is_found_exactly_where_it_matters(steps: list[Step], seed: int) -> None:
    """A step of one rank is left out, repeated, moved or changed: found, or of no harm."""
    draw = random.Random(seed)  # a program, no secret
    rank, place = draw.randrange(8), draw.randrange(len(steps))
    changed = list(steps)
    how = draw.choice(["skip", "repeat", "swap", "length"])
    if how == "skip":
        del changed[place]
    elif how == "repeat":
        changed.insert(place, changed[place])
    elif how == "swap":
        other = draw.randrange(len(steps))
        changed[place], changed[other] = changed[other], changed[place]
    else:
        family, op, length, read = changed[place]
        changed[place] = (family, op, length + 1, read)
    traces = traces_of(
        lambda program: play(program, changed if program.trace.rank == rank else steps), LAYOUT
    )
    errors = [problem for problem in prove(traces) if not problem.is_warning]
    assert bool(errors) == (not simulate(traces)), list(map(str, errors))
    assert all(rank in problem.ranks or problem.kind == "deadlock" for problem in errors)
