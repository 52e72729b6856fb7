"""Steps planned from lengths: exact, proven, the same everywhere, and as good as they say."""

import dataclasses
import random
import re
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_base.errors import ConfigError
from hp_context import Deal, DealCost
from hp_packing import (
    Pipeline,
    Planner,
    StepCosts,
    StepPlan,
    from_text,
    learned_costs,
    lower_bound,
    price,
    prove,
    step_layout,
    to_text,
)
from hp_packing.comparison import compare
from hp_packing.costs import Seconds, pairs_of
from hp_packing.generators import GENERATORS, batches_of, draw, read_lengths
from hp_packing.planning.partition import partition
from hp_packing.planning.templates import Kind, templates_for
from hp_plan.costs.machine import MACHINES
from hp_plan.price.estimate import Plan
from hp_schedule import to_csv
from hp_trainer.config.options import resolve, with_keys

K = 1024
COSTS = StepCosts.equal(token=6e-6, pair=2e-10, key=1e-7, far_key=9e-7, heads=5e-7, microbatch=6e-4)
PIPELINE = Pipeline(4, 16, 32 * K)
PLANNER = Planner(COSTS, PIPELINE, effort=1, prepared=8)


def _batch(name: str = "lognormal-2k", seed: int = 0) -> list[int]:
    return draw(name, tokens=768 * K, longest=64 * K, seed=seed)


@pytest.mark.sample("mock", "log-uniform")
@pytest.mark.parametrize("name", GENERATORS)
def test_a_plan_is_proven_and_no_shorter_than_the_bound(name: str) -> None:
    lengths = _batch(name)
    plan = PLANNER.plan(lengths)
    assert prove(plan, lengths, COSTS, PIPELINE) == ()
    found = price(plan, lengths, COSTS, PIPELINE)
    assert found.bound == lower_bound(lengths, COSTS, PIPELINE)
    assert found.pure < found.bound <= found.seconds < 1.3 * found.pure
    assert found.padding < 0.01
    assert found.tokens <= PIPELINE.tokens


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 16]),
)
def test_any_lengths_are_planned(lengths: list[int], stages: int, ranks: int) -> None:
    pipeline = Pipeline(stages, ranks, 40_000)
    planner = Planner(COSTS, pipeline, effort=1, prepared=4)
    if sum(lengths) > pipeline.tokens * ranks / 8:  # which may fit, or may not
        lengths = lengths[:3]
    plan = planner.plan(lengths)
    assert prove(plan, lengths, COSTS, pipeline) == ()


def test_all_ranks_make_the_same_plan_also_in_the_background() -> None:
    lengths = _batch()
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(PLANNER.plan, lengths)
        plans = [Planner(COSTS, PIPELINE, effort=1, prepared=8).plan(lengths), later.result(60)]
    assert to_text(plans[0]) == to_text(plans[1])


def test_many_ranks_are_teams_that_share_nothing() -> None:
    pipeline = Pipeline(2, 64, 32 * K)
    planner = Planner(COSTS, pipeline, effort=1)
    lengths = draw("lognormal-2k", tokens=2048 * K, longest=64 * K, seed=1)
    plan = planner.plan(lengths)
    assert len(plan.teams) == planner.num_teams == 2
    assert plan.ranks_per_team == 32
    for alone in (
        Planner(COSTS, pipeline, effort=1, tries=1),
        Planner(COSTS, pipeline, effort=0, prepared=2),
    ):
        of_all = list(alone.plan(lengths).teams)
        assert [alone.team(lengths, number) for number in (0, 1)] == of_all
    assert prove(plan, lengths, COSTS, pipeline) == ()


def test_teams_have_the_same_shares() -> None:
    planner = Planner(COSTS, Pipeline(4, 64, 32 * K), effort=1)
    lengths = draw("lognormal-2k", tokens=2048 * K, longest=64 * K, seed=1)
    work = planner._work(lengths)
    teams = planner._teams(work)
    of_teams = [sum(team.seconds) for team in teams]
    assert of_teams == pytest.approx([sum(of_teams) / 2] * 2, rel=1e-3)
    shaped = [each for each in planner._plain_shapes(work) if len({*each.shares}) > 1]
    assert shaped
    for shape in shaped:
        for team in teams:
            for part, share in zip(planner._parts(team, shape) or (), shape.shares, strict=True):
                wanted = share * sum(work.seconds) / len(teams)
                assert sum(part.seconds) == pytest.approx(wanted, rel=0.1)


def test_a_microbatch_of_a_team_fits_its_ranks() -> None:
    """Short documents take hardly any time, so most of their tokens would be in few parts."""
    costs = StepCosts.equal(token=1e-6, pair=1e-8)
    planner = Planner(costs, Pipeline(1, 64, K), effort=1)
    lengths = [30_000, *[1000] * 35]
    room = K * 64 // planner.num_teams
    assert planner.num_teams == 2
    work = planner._work(lengths)
    for shape in planner._plain_shapes(work):
        for team in planner._teams(work):
            for part in planner._parts(team, shape) or ():
                assert sum(part.lengths) <= room


def test_one_document_on_one_rank_of_each_stage_takes_what_the_bound_says() -> None:
    pipeline = Pipeline(4, 1, 64 * K)
    costs = StepCosts.equal(token=6e-6, pair=2e-10, microbatch=6e-4)
    found = price(Planner(costs, pipeline, effort=1).plan([8 * K]), [8 * K], costs, pipeline)
    assert found.seconds == pytest.approx(found.bound, rel=1e-9)


def test_a_plan_is_the_same_after_it_was_written_and_read() -> None:
    lengths = _batch("few-long")
    plan = PLANNER.plan(lengths)
    again = from_text(to_text(plan))
    assert to_text(again) == to_text(plan)
    assert again.teams == plan.teams
    assert prove(again, lengths, COSTS, PIPELINE) == ()


def test_no_line_of_a_plan_may_be_missing_or_other() -> None:
    text = to_text(PLANNER.plan(_batch()))
    rng = random.Random(0)
    lines = text.splitlines()
    for at in [0, 1, 2, 3, len(lines) - 1, *rng.sample(range(len(lines)), 20)]:
        for other in ("", "rank x: 1-2", None):
            changed = [*lines[:at], *([] if other is None else [other]), *lines[at + 1 :]]
            with pytest.raises(ConfigError, match="step plan"):
                from_text("\n".join(changed) + "\n")


def test_what_is_no_plan_is_told_by_line() -> None:
    head = "step plan 1, 3 documents\n"
    wrong = {
        "step plan 2\n": "line 1: 'step plan 2' must be the head of a plan",
        head: "line 2: the end must be team 0",
        f"{head}team 1\n": "line 3: the end must be team 0",
        f"{head}team 0\nmicrobatch 1: documents 0, padding 0, heads over 1\n": "microbatch 0",
        f"{head}team 0\nmicrobatch 0: documents 0, padding 0, heads over 1\nrank 0: 0-2 3-4\n": (
            "before line 5: runs of a Deal"
        ),
        f"{head}team 0\nmicrobatch 0: documents 0, padding 0, heads over 1\nrank 0: 0-1-2\n": (
            "before line 5: invalid literal"
        ),
        f"{head}team {'9' * 5000}\n": "before line 3: Exceeds the limit",
        f"{head}team 0\nschedule\n0F0,xF1\nend\n": "before line 6: rank 0, cell 1: step ('xF1')",
        f"{head}team 0\nschedule\n": "the end must be end",
    }
    for body, message in wrong.items():
        text = f"{body}digest {blake2b(body.encode(), digest_size=16).hexdigest()}\n"
        with pytest.raises(ConfigError, match=re.escape(message)):
            from_text(text)


def _changed(plan: StepPlan, **changes: object) -> StepPlan:
    team = plan.teams[0]
    first = dataclasses.replace(team.microbatches[0], **changes)  # type: ignore[arg-type]
    team = dataclasses.replace(team, microbatches=(first, *team.microbatches[1:]))
    return dataclasses.replace(plan, teams=(team, *plan.teams[1:]))


def test_what_is_wrong_with_a_plan_is_told() -> None:
    lengths = _batch()
    plan = PLANNER.plan(lengths)
    first = plan.teams[0].microbatches[0]
    other = plan.teams[0].microbatches[1].documents[0]
    wrong = {
        r"document \d+ must be in one microbatch, but it is in 0": _changed(
            plan, documents=first.documents[1:]
        ),
        rf"document {other} must be in one microbatch, but it is in 2": _changed(
            plan, documents=(*first.documents, other)
        ),
        r"positions dealt out": _changed(plan, padding=first.padding + 1),
        r"padding \(-1\)": _changed(plan, padding=-1),
        r"ranks of a stage \(16\)": _changed(
            plan, deal=Deal(((range(first.deal.seq_len),),)), heads=1
        ),
        r"must be below the number": _changed(plan, documents=(10**6,)),
        r"must be those of the batch": dataclasses.replace(plan, num_documents=3),
    }
    for message, changed in wrong.items():
        problems = prove(changed, lengths, COSTS, PIPELINE)
        assert any(re.search(message, problem) for problem in problems), (message, problems)
    held = int(price(plan, lengths, COSTS, PIPELINE).tokens)
    small = dataclasses.replace(PIPELINE, tokens=held - 1)
    assert any(f"most {held - 1}" in each for each in prove(plan, lengths, COSTS, small))
    deep = dataclasses.replace(PIPELINE, num_stages=5)
    assert any("stages (4) must be 5" in each for each in prove(plan, lengths, COSTS, deep))


def test_what_fits_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="must fit"):
        Planner(COSTS, Pipeline(2, 2, 100), effort=1).plan([1000])
    for lengths in ([], [3, 0]):
        with pytest.raises(ConfigError, match="not empty"):
            PLANNER.plan(lengths)


@pytest.mark.sample("log-uniform")
@pytest.mark.parametrize("name", GENERATORS)
def test_the_planner_is_never_behind_others_and_ahead_of_static_packs(name: str) -> None:
    planner = Planner(COSTS, Pipeline(4, 16, 64 * K), effort=4, prepared=4)
    lengths = draw(name, tokens=1024 * K, longest=128 * K, seed=3)
    found = compare(lengths, planner, pack=128 * K, degree=8)
    planned = found.rows[-1].seconds
    assert not found.problems
    assert all(planned <= row.seconds for row in found.rows)
    assert found.by_name["static packs, 1F1B"].seconds > 1.15 * planned


@pytest.mark.parametrize(("tokens", "pack"), [(1, 64), (5, 4), (1000, 100)])
def test_steps_of_few_tokens_are_compared_as_any_other(tokens: int, pack: int) -> None:
    """Fewer packs than groups of ranks, or packs of fewer tokens than ranks, or no multiple."""
    planner = Planner(COSTS, Pipeline(2, 16, 100), effort=1, prepared=1)
    lengths = draw("few-long", tokens=tokens, longest=pack, seed=0)
    found = compare(lengths, planner, pack=pack, degree=8)
    assert {"static packs, 1F1B", "Megatron's rule, 1F1B"} <= found.by_name.keys()
    assert found.problems == ()


def test_a_prepared_schedule_is_proven_as_any_other_and_about_as_good() -> None:
    pipeline = Pipeline(4, 16, 32 * K)
    lengths = draw("log-uniform", tokens=1024 * K, longest=32 * K, seed=2)
    plain = Planner(COSTS, pipeline, effort=1, prepared=0)
    prepared = Planner(COSTS, pipeline, effort=0, tries=4, prepared=12)
    plans = [planner.plan(lengths) for planner in (plain, prepared, prepared)]
    seconds = [price(plan, lengths, COSTS, pipeline).seconds for plan in plans]
    assert seconds[1] == seconds[2] < 1.02 * seconds[0]
    assert plans[1].origin == "prepared"
    assert prove(plans[1], lengths, COSTS, pipeline) == ()


def test_a_long_step_has_the_shares_that_are_best_for_its_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [_batch("mock", seed) for seed in range(3)]
    planner = Planner(COSTS, PIPELINE, prepared=2, typical=batches[:1])
    ahead = 0
    for lengths in batches:
        (work,) = planner._teams(planner._work(lengths))
        for shape in planner._fitted:
            before = planner._expected(work, shape)
            after = planner._expected(work, planner._adapted(shape, work))
            if before is not None:
                assert after is not None
                assert after <= before
                ahead += after < 0.9999 * before
    assert ahead > 1
    assert next(planner._shapes(work, [work])) in planner._fitted
    monkeypatch.setattr("hp_packing.planning.planner._LONG", 0.0)
    assert any(shape not in planner._fitted for shape in planner._shapes(work, [work]))


def test_templates_depend_on_what_is_asked_alone() -> None:
    """So all ranks come to the same, whatever they have planned before, also after a resume."""
    stages = (Seconds(0.333, 0.341, 0.329), Seconds(0.30, 0.30, 0.28))
    each = (Seconds(0.0011, 0.0011),) * 2
    kind = Kind(12, stages, each, (Seconds(),) * 2, message=0.009, memory=0.71).rounded()
    assert kind.memory <= 0.71
    other = (Seconds(0.3332, 0.3413, 0.3287), Seconds(0.3003, 0.2998, 0.2801))
    assert kind == Kind(12, other, each, (Seconds(),) * 2, message=0.008, memory=0.708).rounded()
    found = templates_for(kind, 3)
    templates_for.cache_clear()
    templates_for(kind._replace(memory=0.5), 3)
    assert templates_for(kind, 3) == found
    assert [t.seconds for t in found] == sorted(t.seconds for t in found)
    for template in found:
        assert sum(template.shares) == pytest.approx(1.0)
        assert template.schedule.num_microbatches == len(template.shares) <= 12
    assert templates_for(kind._replace(memory=1e-3), 3) == ()


@pytest.mark.parametrize("prepared", [0, 1])
def test_what_a_run_asks_of_a_plan_is_kept(prepared: int) -> None:
    """Teams, heads and multiples of positions are those of its mesh; whole backwards are whole."""
    pipeline = Pipeline(2, 8, 32 * K)
    planner = Planner(
        COSTS,
        pipeline,
        effort=0,
        prepared=prepared,
        team=4,
        heads=2,
        unit=3,
        split_backward=False,
    )
    lengths = draw("lognormal-2k", tokens=128 * K, longest=32 * K, seed=5)
    plan = planner.plan(lengths)
    assert prove(plan, lengths, COSTS, pipeline) == ()
    assert (planner.num_teams, plan.ranks_per_team) == (2, 4)
    usual = Planner(COSTS, pipeline, effort=0, prepared=prepared).plan(lengths)
    assert "W" in to_csv(usual.teams[0].schedule)
    for team in plan.teams:
        assert "W" not in to_csv(team.schedule)
        for microbatch in team.microbatches:
            assert microbatch.heads == 2
            assert all(size % 3 == 0 for size in microbatch.deal.sizes)
    parts = [[list(each.documents) for each in team.microbatches] for team in plan.teams]
    again = planner.of_parts(lengths, parts)
    assert again is not None
    assert [t.microbatches for t in again.teams] == [t.microbatches for t in plan.teams]


def test_what_no_template_fits_is_planned_without() -> None:
    lengths = [50] * 7
    pipeline = Pipeline(2, 1, 60)
    prepared = Planner(COSTS, pipeline, effort=0, prepared=2)
    plan = prepared.plan(lengths)
    assert prove(plan, lengths, COSTS, pipeline) == ()


def test_a_prepared_schedule_that_does_not_fit_these_documents_is_not_taken() -> None:
    """What takes long is not what has many tokens: microbatches hold other shares than planned."""
    long = [6682, 6868, 8337, 6109, 4719]
    short = [599, 129, 499, 543, 722, 880, 885, 102, 812, 556, 372, 838, 334, 705, 204, 425]
    costs, pipeline = StepCosts.equal(token=1e-6, pair=1e-8), Pipeline(3, 1, 11530)
    plan = Planner(costs, pipeline, effort=1, prepared=8).plan([*long, *short])
    assert prove(plan, [*long, *short], costs, pipeline) == ()


def test_parts_have_their_shares() -> None:
    rng = random.Random(0)
    costs = [rng.lognormvariate(0, 1) for _ in range(400)]
    shares = [0.05, 0.1, *[0.17] * 5]
    parts = partition(costs, [1] * 400, shares, longest=400)
    assert parts is not None
    assert sorted(document for part in parts for document in part) == list(range(400))
    for part, share in zip(parts, shares, strict=True):
        assert sum(costs[i] for i in part) / sum(costs) == pytest.approx(share, abs=2e-3)
    assert partition(costs, [1] * 400, shares, longest=3) is None
    assert partition([1.0], [1], [0.5, 0.5], longest=3) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_part_is_too_long(seed: int) -> None:
    """Also after swaps, where what is dear is short and what is cheap is long."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 99) for _ in range(40)]
    costs = [rng.lognormvariate(0, 1) for _ in lengths]
    longest = sum(lengths) // 5 + 20
    parts = partition(costs, lengths, [0.3, 0.25, 0.2, 0.15, 0.1], longest=longest)
    for part in parts or []:
        assert sum(lengths[i] for i in part) <= longest


def test_keys_are_paid_for_once_near_or_far_and_wait_behind_attention() -> None:
    equal = StepCosts.equal(token=0.0, pair=1.0, key=1.0, far_key=10.0)
    costs = dataclasses.replace(equal, hidden=0.5)
    (found,) = costs.of_parts([1, 1], DealCost((4.0, 4.0), (5.0, 0.0), (2.0, 0.0)))
    keys = 3 * 1.0 + 2 * 10.0
    assert found.forward == pytest.approx(4 + keys - 0.5 * 4)
    assert found.input_grad == pytest.approx(2.5 * 4 + 3 * keys - 0.5 * 2.5 * 4)
    assert found.weight_grad == 0.0


def test_layers_look_at_what_their_windows_say() -> None:
    config = resolve("debug-gpt-oss", [], env={}).config
    layout, model = step_layout(config, stages=1, ranks=1), config.model
    windows = learned_costs(layout, MACHINES["h100"], vocab_size=256).windows
    assert len({*windows}) == 2
    for layer, window in enumerate(windows):  # of so many positions the last is a query's own
        assert window == (model.sliding_window - 1 if model.has_window(layer) else None)


TINY: dict[str, tuple[tuple[str, object], ...]] = {
    "dense": (("model.num_experts", 0),),
    "moe": (("model.num_experts", 8), ("model.num_dense_layers", 1)),
    "mla": (("model.attention", "mla"), ("model.qk_norm", False), ("model.num_experts", 0)),
    "window": (("model.sliding_window", 32), ("model.full_attention_every", 2)),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("machine", ["h100", "cpu"])
def test_costs_are_what_a_layout_is_priced_at(name: str, machine: str) -> None:
    """Of one length, a step plan's stages take what `hp plan` says of them."""
    given = (*TINY[name], ("data.seq_len", 2048), ("model.num_layers", 4))
    layout = step_layout(resolve("", given, env={}).config, stages=2, ranks=1)
    sizes = {"train.microbatch_size": 4, "train.global_batch_size": 256, "mesh.gather": "stage"}
    dtype = "float32" if machine == "cpu" else "bfloat16"
    layout = with_keys(layout, {**sizes, "train.dtype": dtype})
    rates = MACHINES[machine].with_values(launch_seconds=0.0 if machine == "cpu" else 1e-12)
    costs = learned_costs(layout, rates, vocab_size=256)
    plan = Plan(layout, rates, vocab_size=256)
    tokens = plan.config.microbatch_tokens
    pairs = sum(pairs_of([2048] * (tokens // 2048), costs))
    for stage, priced in zip(costs.stages, plan.prices, strict=True):
        mine = stage.alone(tokens, pairs)
        assert mine.forward == pytest.approx(priced.forward, rel=0.02)
        assert mine.total == pytest.approx(priced.full, rel=0.15)
        assert stage.kept * tokens == pytest.approx(priced.kept)
    first, last = costs.stages
    if name != "moe":  # where the first has a dense layer, of another width
        assert last.token.total > first.token.total  # the output matrix and the loss
    assert min(first.pair.forward, last.pair.forward) > 0
    assert costs.windows == ((31, None) * 2 if name == "window" else (None,) * 4)


def test_experts_add_what_their_rows_take_on_the_way() -> None:
    config = resolve("", (("model.num_experts", 8),), env={}).config
    machine = MACHINES["h100"]
    alone, shared = (
        learned_costs(step_layout(config, stages=2, ranks=n), machine, vocab_size=256).stages[0]
        for n in (1, 8)
    )
    assert shared.token.forward > alone.token.forward
    assert shared.microbatch.forward > alone.microbatch.forward  # latencies
    plain = with_keys(config, {"mesh.ep": 1})
    assert step_layout(plain, stages=2, ranks=12).mesh.ep == 4


def test_lengths_are_read_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("5, 7\n11 13\n\n")
    assert read_lengths(path) == [5, 7, 11, 13]
    assert batches_of([5, 7, 11, 13], tokens=10, longest=8) == [[5, 5], [2, 8]]
    assert draw("mock", tokens=9000, longest=8192, seed=1) == draw(
        "mock", tokens=9000, longest=8192, seed=1
    )
    for text in ("x", "0", "-3", "", "1.5"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_lengths(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_lengths(tmp_path / "none")
