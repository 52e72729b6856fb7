"""Steps, their text and their packed form."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_schedule import MetaStep, MetaStepType, Row, Schedule, one_f_one_b
from hp_schedule.steps import MAX_MICROBATCHES, MAX_STAGES, pack, unpack

T = MetaStepType
_stages = st.integers(0, MAX_STAGES - 1)
_microbatches = st.integers(0, MAX_MICROBATCHES - 1)


def _steps(*types: MetaStepType) -> st.SearchStrategy[MetaStep]:
    return st.builds(MetaStep, st.sampled_from(types), _stages, _microbatches)


@st.composite
def _overlaps(draw: st.DrawFn) -> MetaStep:
    forward, backward = draw(_steps(T.FWD)), draw(_steps(T.BWD, T.BWD_INPUT))
    if draw(st.booleans()):
        return MetaStep(T.OVERLAP_F_B, sub_steps=(forward, backward))
    return MetaStep(T.OVERLAP_B_F, sub_steps=(backward, forward))


any_step = (
    _steps(*(kind for kind in T if not kind.is_overlap and not kind.is_fsdp))
    | st.builds(MetaStep, st.sampled_from([kind for kind in T if kind.is_fsdp]), _stages)
    | _overlaps()
)


@given(any_step)
def test_text_of_a_step_reads_back_as_the_same_step(step: MetaStep) -> None:
    assert MetaStep.from_str(str(step)) == step


@given(any_step)
def test_packing_a_step_loses_nothing(step: MetaStep) -> None:
    assert unpack(pack(step)) == step


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("2F0", MetaStep(T.FWD, 2, 0)),
        ("1UNSHARD", MetaStep(T.FSDP_UNSHARD, 1)),
        (" 3SEND_F1 ", MetaStep(T.FWD_SEND, 3, 1)),
        (
            "(0F1;1B0)OVERLAP_F_B",
            MetaStep(T.OVERLAP_F_B, sub_steps=(MetaStep(T.FWD, 0, 1), MetaStep(T.BWD, 1, 0))),
        ),
        (
            "(1I0;0F1)OVERLAP_B_F",
            MetaStep(T.OVERLAP_B_F, sub_steps=(MetaStep(T.BWD_INPUT, 1, 0), MetaStep(T.FWD, 0, 1))),
        ),
    ],
)
def test_grammar_is_that_of_torch(text: str, step: MetaStep) -> None:
    assert MetaStep.from_str(text) == step


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "2F",
        "2F0xyz",
        "x2F0",
        "2F-1",
        "2F0 1F0",
        "2X0",
        "1UNSHARD0",
        "(0F1;1B0)",
        "(0F1;1B0)OVERLAP_F_Bx",
        "(0F1,1B0)OVERLAP_F_B",
        "(1B0;0F1)OVERLAP_F_B",
        "(0F1;1F0)OVERLAP_F_B",
        "(0F1;1W0)OVERLAP_F_B",
        "(0F1)OVERLAP_F_B",
        "2F\u0661",
    ],
)
def test_anything_but_exactly_one_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        MetaStep.from_str(text)


def test_equality_and_hash_look_at_the_halves_of_an_overlap() -> None:
    first, second = (MetaStep.from_str(f"(0F{index};1B0)OVERLAP_F_B") for index in (1, 2))
    assert first != second
    assert hash(first) != hash(second)
    assert first == MetaStep.from_str("(0F1;1B0)OVERLAP_F_B")


@pytest.mark.parametrize(
    ("kind", "stage", "microbatch"),
    [(T.FWD, None, 0), (T.FWD, -1, 0), (T.BWD, 0, None), (T.FSDP_RESHARD, 0, 1)],
)
def test_a_step_has_the_indices_of_its_type(
    kind: MetaStepType, stage: int | None, microbatch: int | None
) -> None:
    with pytest.raises(ValueError, match="must be"):
        MetaStep(kind, stage, microbatch)


def test_a_row_shows_steps_and_keeps_its_order_and_bubbles() -> None:
    steps = [MetaStep(T.FWD, 0, 0), None, MetaStep(T.BWD, 0, 0)]
    row = Row(map(pack, steps))
    assert list(row) == steps
    assert row[1] is None
    assert row[-1] == steps[-1]
    assert list(row[1:]) == steps[1:]
    assert row == Row(map(pack, steps))
    assert row != Row(map(pack, steps[:2]))


def test_schedules_compare_hash_and_pickle_by_content() -> None:
    schedule = one_f_one_b(3, num_microbatches=4)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert schedule != one_f_one_b(3, num_microbatches=5)


def test_a_schedule_cannot_be_changed() -> None:
    schedule = one_f_one_b(2, num_microbatches=2)
    with pytest.raises(AttributeError):
        schedule.num_microbatches = 3  # type: ignore[misc]
    schedule.steps[0].codes()[0] = -1
    assert schedule.steps[0][0] == MetaStep(T.FWD, 0, 0)


def test_neighbours_follow_the_chains() -> None:
    schedule = Schedule.from_steps(
        [[], []], stage_to_rank=[0, 1, 1, 0], num_microbatches=1, chains=[[0, 1], [2, 3]]
    )
    assert schedule.upstream == (-1, 0, -1, 2)
    assert schedule.downstream == (1, -1, 3, -1)
    assert schedule.edges == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("stage_to_rank", "num_microbatches", "chains", "message"),
    [
        ([0, 2], 1, (), r"rank \(2\) of stage 1"),
        ([0, 1], 0, (), r"num_microbatches \(0\)"),
        ([0, 1], 1, ((0,),), "each of the 2 stages once"),
        ([0, 1], 1, ((0, 1), (1,)), "each of the 2 stages once"),
        ([], 1, (), r"num_stages \(0\)"),
    ],
)
def test_placement_chains_and_counts_must_fit(
    stage_to_rank: list[int], num_microbatches: int, chains: tuple[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_steps(
            [[], []],
            stage_to_rank=stage_to_rank,
            num_microbatches=num_microbatches,
            chains=chains,
        )


@pytest.mark.parametrize("text", ["2F0", "0F1", "(0F0;2B0)OVERLAP_F_B"])
def test_a_step_beyond_the_stages_or_microbatches_is_refused_with_its_cell(text: str) -> None:
    with pytest.raises(ValueError, match="rank 1, cell 0"):
        Schedule.from_steps(
            [[], [MetaStep.from_str(text)]], stage_to_rank=[0, 1], num_microbatches=1
        )
