"""What the entries of the registry say, and what is read from them."""

import inspect
from argparse import ArgumentParser

import pytest

import hp_schedule
from hp_schedule import SCHEDULES, Schedule, ScheduleKind, closed_form, gpipe, interleaved_1f1b
from hp_schedule.arguments import OPTIONS, _reading, parser
from hp_schedule.cli import main
from hp_schedule.generators.form import REGISTERED, schedule_kind
from hp_schedule.generators.rounds import Rounds
from hp_schedule.searching.search import closed_forms
from hp_schedule.steps import OVERLAP_B_F, OVERLAP_F_B

_KINDS = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=list(SCHEDULES))


@_KINDS
def test_a_public_function_returns_all_rows_of_its_rule(kind: ScheduleKind) -> None:
    generate = getattr(hp_schedule, kind.generate.__name__)
    assert generate is kind.generate
    assert (
        generate(3, num_microbatches=4) == closed_form(generate, 3, num_microbatches=4).schedule()
    )
    signature = inspect.signature(generate)
    assert signature.return_annotation is Schedule
    assert list(signature.parameters) == ["num_ranks", "num_microbatches", *kind.options]


@_KINDS
def test_an_entry_says_what_it_is_for_and_whose_it_is(kind: ScheduleKind) -> None:
    for text in (kind.purpose, kind.source):
        assert text
        assert "|" not in text
        assert not text.endswith(".")


@_KINDS
def test_what_is_read_from_small_rows_holds_for_all(kind: ScheduleKind) -> None:
    for num_ranks in (1, 2, 5):
        for per_rank in [kind.stages_per_rank] if kind.stages_per_rank else (1, 2, 3):
            schedule = kind.build(num_ranks, 7, per_rank)
            assert schedule.num_stages == num_ranks * per_rank + kind.returns
            assert schedule.is_forward_only is not kind.trains
            ends_meet = schedule.stage_to_rank[-1] == 0
            assert ends_meet is (kind.style != "loop" or num_ranks == 1)


@_KINDS
def test_pairs_are_made_where_they_are_asked_for(kind: ScheduleKind) -> None:
    alone, paired = (kind.build(4, 8, kind.stages_per_rank or 2, paired=p) for p in (False, True))
    assert not alone.kinds & {OVERLAP_B_F, OVERLAP_F_B}
    assert bool(paired.kinds & {OVERLAP_B_F, OVERLAP_F_B}) is bool(kind.pairs)


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 9])
def test_with_one_stage_per_rank_some_are_another_step_for_step(num_microbatches: int) -> None:
    same = {kind.name: kind.with_one_stage for kind in SCHEDULES.values() if kind.with_one_stage}
    assert same == {"looped_bfs": "gpipe", "interleaved_1f1b": "1f1b"}
    for name, other in same.items():
        alone = SCHEDULES[name].build(4, num_microbatches, 1)
        assert alone == SCHEDULES[other].build(4, num_microbatches, 1)


def test_a_search_tries_every_schedule_that_trains_where_it_fits() -> None:
    tried = {
        name
        for style in ("loop", "v")
        for number in (1, 2)
        for name, _ in closed_forms(
            4, num_microbatches=4, num_stages_per_rank=number, style=style, latency=0.2
        )
    }
    loops_and_vs = [kind for kind in SCHEDULES.values() if kind.trains and kind.style != "u"]
    assert tried == {name for kind in loops_and_vs for name in kind.variants(4, latency=0.2)}
    assert {"zero_bubble 2p", "v_half for the latency"} < tried


def test_every_option_has_a_flag_that_reads_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "4", "--microbatches", "6", "--json"]
    given = {"--latency": "0.4", "--warm-up": "6", "--extra": "1", "--max-in-flight": "1.5p"}
    names = {"--latency": "zbv", "--warm-up": "u_shape", "--extra": "u_shape"}
    options = {"--latency": 0.4, "--warm-up": 6, "--extra": 1, "--max-in-flight": "1.5p"}
    for flag, text in given.items():
        kind = SCHEDULES[names.get(flag, "zero_bubble")]
        assert main(["generate", kind.name, flag, text, *sizes]) == 0
        keyword = flag.removeprefix("--").replace("-", "_")
        expected = kind.generate(4, num_microbatches=6, **{keyword: options[flag]})
        assert hp_schedule.from_json(capsys.readouterr().out) == expected
    every = {name for kind in SCHEDULES.values() for name in kind.options if name != kind.pairs}
    assert every == set(OPTIONS)


def test_an_option_that_is_a_switch_can_be_left_out_or_turned_off() -> None:
    words = ArgumentParser()
    words.add_argument("--squeezed", **_reading(bool))
    given: list[list[str]] = [[], ["--squeezed"], ["--no-squeezed"]]
    assert [words.parse_args(text).squeezed for text in given] == [None, True, False]


def test_the_help_says_whose_an_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "of zbv, v_half" in text
    assert "of zero_bubble: 1p, 1.5p, 2p, or a number" in text


@pytest.mark.parametrize(
    ("name", "pairs", "message"),
    [
        ("gpipe", "", r"name \(gpipe\) must not be that of another schedule"),
        ("new", "overlap", r"pairs \(overlap\) must be an option of new"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(name: str, pairs: str, message: str) -> None:
    def new(num_ranks: int, *, num_microbatches: int) -> Rounds:
        return Rounds(num_ranks, num_microbatches, rounds=[range(num_microbatches)], warm_ups=None)

    before = list(REGISTERED)
    with pytest.raises(ValueError, match=message):
        schedule_kind(purpose="a test", source="here", name=name, pairs=pairs)(new)
    assert before == REGISTERED


def test_rows_in_pairs_can_be_made_alone() -> None:
    form = closed_form(interleaved_1f1b, 4, num_microbatches=6, overlap_b_f=True)
    whole = form.schedule(communication=True)
    assert tuple(form.row(rank) for rank in range(4)) == whole.steps
    hp_schedule.validate(whole, communication=True).raise_if_failed()


def test_lists_keep_the_published_order() -> None:
    assert list(SCHEDULES)[:3] == ["gpipe", "1f1b", "looped_bfs"]
    assert gpipe is SCHEDULES["gpipe"].generate
