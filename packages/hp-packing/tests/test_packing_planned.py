"""Planned steps before they run: rules of the config, files of costs, documents put together."""

from pathlib import Path

import pytest
import torch

from hp_base.errors import ConfigError
from hp_base.runs import runs_in
from hp_data import load_tokenizer
from hp_data.dataset import Dataset
from hp_data.preparation import prepare
from hp_packing import Pipeline, Planner, StepCosts, prove
from hp_packing.batch import join
from hp_packing.costs import read_costs
from hp_plan.layouts.command import run as run_plan
from hp_trainer.config.options import for_saving, resolve
from hp_trainer.layout.schedules import planned_tokens, splits_backward
from hp_trainer.model.block import look_ahead
from hp_trainer.model.randomness import uniform

PLAIN = {f"mesh.{axis}": 1 for axis in ("pp", "dp_replicate", "ep")}
PLANNED = {**PLAIN, "pipeline.stages_per_rank": 1, "data.packing": "planned"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pipeline.schedule": "zbv", "pipeline.stages_per_rank": 2}, "stages_per_rank (2) must"),
        ({"pipeline.schedule": "u_shape"}, 'pipeline.schedule ("u_shape") must be gpipe or'),
        ({"pipeline.retention": "recompute"}, 'pipeline.retention ("recompute") must be'),
        ({"mesh.pp": 2, "mesh.stage_tp": [1, 2]}, "mesh.stage_tp ([1, 2]) must be []"),
        (
            {
                "mesh.cp": 2,
                "mesh.cp_heads": 1,
                "mesh.cp_deal": True,
                "train.microbatch_size": 1,
            },
            "mesh.cp_deal (true) must be false",
        ),
        ({"train.compile": "inductor"}, 'train.compile ("inductor") must be "none"'),
        ({"model.factory": "torch:nn"}, "data.packing"),
        ({"data.plan_tokens": 100}, "data.plan_tokens (100) must be at least data.seq_len (128)"),
        ({"data.documents": "joined"}, "data.documents"),
        ({"data.plan_costs": "nowhere.toml"}, "data.plan_costs"),
        ({"data.packing": "stream", "data.plan_tokens": 4}, "data.plan_tokens (4) must be 0"),
        ({"data.packing": "best_fit", "data.plan_costs": "x"}, 'data.plan_costs ("x") must be ""'),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, [*(PLANNED | overrides).items()])
    assert message in str(caught.value)


def test_memory_is_that_of_1f1b_unless_it_is_given() -> None:
    keys = {"mesh.pp": 4, "mesh.cp": 2, "mesh.cp_heads": 1, "train.microbatch_size": 3}
    keys |= {"train.global_batch_size": 12}
    config = resolve(None, [*(PLANNED | keys).items()]).config
    assert planned_tokens(config) == 4 * 3 * 128 // 2
    given = resolve(None, [*(PLANNED | keys | {"data.plan_tokens": 99}).items()]).config
    assert planned_tokens(given) == 99
    assert splits_backward(config)
    block = resolve(
        None, [*(PLANNED | {"mesh.gather": "block", "mesh.dp_shard": 2}).items()]
    ).config
    assert not splits_backward(block)


def test_a_file_of_costs_is_kept_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costs.toml").write_text("token = 1e-6")
    monkeypatch.chdir(tmp_path)
    resolved = resolve(None, [*(PLANNED | {"data.plan_costs": "costs.toml"}).items()])
    assert for_saving(resolved).data.plan_costs == str(tmp_path / "costs.toml")


def test_costs_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("token = 2e-6\npair = 3e-9\nkey = 1e-8\nmessage = 1\n")
    found = read_costs(path, windows=(None, 7))
    expected = StepCosts.equal(token=2e-6, pair=3e-9, key=1e-8, message=1.0, windows=(None, 7))
    assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token = -1.0", "token = -1.0 must be a number >= 0"),
        ("token = true", "token = True"),
        ("node = 4", "node = 4"),
        ("tokens = 1.0", "tokens = 1.0 must be a number >= 0 of one of token, pair"),
        ("token = inf", "token = inf"),
        ("token =", "must be a TOML file"),
        ("token = 1.0", "must have pair"),
    ],
)
def test_other_costs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_costs(path, windows=(None,))
    assert message in str(caught.value)


def test_layouts_of_a_planned_run_are_not_priced_by_one_length() -> None:
    with pytest.raises(ConfigError, match="--lengths prices planned steps"):
        run_plan(resolve(None, [*PLANNED.items()]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("split_backward", [True, False])
def test_teams_take_their_microbatches_in_one_order(split_backward: bool) -> None:
    lengths = [900, 30, 31, 32, 500, 90, 64, 64, 700, 1, 2, 3, 400, 410, 420, 430]
    pipeline = Pipeline(2, 4, 900)
    costs = StepCosts.equal(token=1e-5, pair=1e-7, microbatch=1e-4)
    planner = Planner(
        costs,
        pipeline,
        effort=4,
        team=2,
        heads=2,
        unit=3,
        split_backward=split_backward,
        one_order=True,
    )
    plan = planner.plan(lengths)
    assert prove(plan, lengths, costs, pipeline) == ()
    assert len(plan.teams) == 2
    assert plan.teams[0].schedule is plan.teams[1].schedule
    for team in plan.teams:
        assert all(len(each.deal.parts) == each.heads == 2 for each in team.microbatches)
        assert all(size % 3 == 0 for each in team.microbatches for size in each.deal.sizes)


def test_an_order_that_does_not_fit_is_refused() -> None:
    lengths = [400, 400, 400, 400]
    costs = StepCosts.equal(token=1e-5, pair=1e-7)
    parts = [[[0], [1]], [[2], [3]]]
    planner = Planner(costs, Pipeline(2, 2, 400), team=1, one_order=True)
    assert planner.of_parts(lengths, parts) is not None
    tight = Planner(costs, Pipeline(2, 2, 300), team=1, one_order=True)
    assert tight.of_parts(lengths, parts) is None
    with pytest.raises(ConfigError, match="must fit 2 ranks with memory for 300 tokens"):
        tight.plan(lengths)


def _data(tmp_path: Path) -> Dataset:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"{i:03}.txt").write_text(f"document {i} " * (1 + 7 * i % 23))
    prepare(tmp_path / "data", paths=[str(corpus)], tokenizer=load_tokenizer(""), eval_fraction=0.2)
    return Dataset.open(tmp_path / "data", "train", seq_len=64, seed=0, packing="planned")


def test_pieces_are_the_documents_of_sequences_wherever_they_are_put(tmp_path: Path) -> None:
    data = _data(tmp_path)
    batch = range(data.num_sequences - 3, data.num_sequences + 2)  # from one pass into the next
    pieces, whole = data.pieces(batch), data.batch(batch)
    assert sum(piece.num_targets() for piece in pieces) == data.num_targets(batch)
    assert sum(piece.num_targets(ahead=2) for piece in pieces) == data.num_targets(batch, ahead=2)
    order = [*reversed(pieces)]
    joined = join(data, order, padding=3, num_ahead=(1, 1))
    assert joined.lengths == (*(piece.length for piece in order), 3)
    assert joined.ahead is not None
    document, within, sequence, place = joined.places
    here = document >= 0
    assert (~here).sum() == 3
    rows = sequence[here] - batch.start
    for ours, theirs in ((joined.tokens, whole.tokens), (joined.targets, whole.targets)):
        assert torch.equal(ours[0, here], theirs[rows, place[here]])
    assert (joined.targets[0, ~here] == -1).all()
    assert (within[document == 0] == torch.arange(order[0].length)).all()
    for depth, aims in enumerate(look_ahead(whole.tokens, whole.targets, (1, 1)).targets):
        assert torch.equal(joined.ahead.targets[depth][0, here], aims[rows, place[here]])


def test_random_numbers_are_those_of_the_place_in_the_data() -> None:
    rows = uniform(77, torch.tensor([5, 2**33]), torch.arange(6), 3)
    sequence = torch.tensor([[2**33, 5, 5, 2**33]])
    places = torch.tensor([4, 0, 1, 5])
    mixed = uniform(77, sequence, places, 3)
    expected = torch.stack([rows[1, 4], rows[0, 0], rows[0, 1], rows[1, 5]])
    assert torch.equal(mixed[0], expected)


def test_runs_end_where_a_sequence_does() -> None:
    found = [*runs_in([7, 7, 8, 8, -1, 7], [0, 1, 2, 3, 4, 6])]
    assert found == [(7, 0, slice(0, 2)), (8, 2, slice(2, 4)), (7, 6, slice(5, 6))]
