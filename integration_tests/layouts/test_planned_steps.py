"""Steps that run a plan: they learn what one process learns, whatever the plan, and all alike."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed import distributed_c10d

from hp_base.errors import ConfigError, DataError
from hp_data import load_tokenizer
from hp_packing import StepPlan, prove
from hp_packing.steps import PlannedStep, StepPlanning
from hp_platform import PeerError, RankInfo, initialize, shutdown
from hp_platform.testing import compare, run_distributed
from hp_trainer.training.trainer import Trainer
from integration_tests.layouts.verify_planned import CASES
from integration_tests.runs import config_of, prepare_run, train_in, worker_of

ROOT = Path(__file__).parents[1]
PLANNED = {"data": {"packing": "planned", "seq_len": 256}}
TRAIN = {"steps": 2, "global_batch_size": 4, "microbatch_size": 1, "dtype": "float64"}
IS_WHOLE = bool(os.environ.get("HP_WHOLE"))


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.sample("lognormal", "few long")
@pytest.mark.parametrize("name", CASES)
def test_layouts_equal_one_process(name: str) -> None:
    """With HP_WHOLE, 11 layouts of each kind of lengths, 88, and more of both batch and steps."""
    count = 11 if IS_WHOLE else {"lognormal": 2}.get(name, 1)
    size = () if IS_WHOLE else ("--steps", "2", "--sequences", "2")
    end = subprocess.run(
        [
            *(sys.executable, "-m", "integration_tests.layouts.verify_planned", name),
            *("--count", str(count), *size),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900 if IS_WHOLE else 200,
        check=False,
        cwd=ROOT.parent,
    )
    assert end.returncode == 0, end.stdout
    assert end.stdout.endswith(f"{count} of {count} equal\n"), end.stdout


@pytest.mark.parametrize("experts", [0, 4])
def test_a_planned_step_is_that_of_the_sequences_it_is_planned_from(
    tmp_path: Path, experts: int
) -> None:
    """But for what is balanced, which is documents here and sequences there."""
    model = {"num_experts": experts, "balance_coefficient": 0.0, "num_mtp_modules": 1}
    found = []
    for packing in ("planned", "best_fit"):
        config = config_of(PLANNED, model=model, train=TRAIN)
        config = msgspec.structs.replace(
            config, data=msgspec.structs.replace(config.data, packing=packing)
        )
        result = train_in(config, tmp_path / packing)
        found.append(
            {
                **{f"loss {i}": value for i, value in enumerate(_values(result.losses))},
                **{f"ahead {i}": value for i, value in enumerate(_values(result.ahead))},
                **{f"norm {i}": value for i, value in enumerate(_values(result.norms))},
                **{f"gradient {name}": x for name, x in result.first_gradients.items()},
                **{f"weight {name}": x for name, x in result.parameters.items()},
                "eval": _values([result.eval_loss])[0],
            }
        )
    comparison = compare(*found, bound=1e-12)
    assert comparison.ok, str(comparison)


def _values(numbers: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


LAYOUT = config_of(
    {"mesh": {"pp": 2, "dp_replicate": 2, "cp": 2, "cp_heads": 1, "ep": 4}},
    data={"packing": "planned", "seq_len": 128},
    train={**TRAIN, "steps": 3, "dtype": "float32"},
)


def _trainer(encoded: bytes, directory: str, address: str) -> Trainer:
    config = msgspec.json.decode(encoded, type=type(LAYOUT))
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, init_method=address)
    return Trainer(config, worker_of(info, Path(directory)), runtime, load_tokenizer(""))


def rank_counts_groups(encoded: bytes, directory: str, address: str) -> list[str]:
    """Train; what is made in a step, the digest of each plan, and what is wrong with it."""
    trainer = _trainer(encoded, directory, address)
    groups, found = len(distributed_c10d._world.pg_map), []
    while trainer.step < trainer.config.train.steps:
        metrics, _ = trainer.train_step()
        planned = trainer.planned
        assert isinstance(planned, PlannedStep)
        assert isinstance(trainer.planning, StepPlanning)
        planner = trainer.planning.planner
        lengths = [piece.length for piece in planned.pieces]
        problems = prove(planned.plan, lengths, planner.costs, planner.pipeline)
        orders = {team.schedule.steps for team in planned.plan.teams}
        assert len(planned.plan.teams) == 2
        assert metrics.microbatches == len(planned.plan.teams[0].microbatches)
        found.append(f"{planned.plan.digest} {problems} {len(orders)}")
    made = len(distributed_c10d._world.pg_map) - groups
    trainer.close()
    return [f"{made} groups", *found]


def test_ranks_make_one_proven_plan_and_no_communicator_in_a_step(tmp_path: Path) -> None:
    address = prepare_run(LAYOUT, tmp_path)
    told = run_distributed(
        *(rank_counts_groups, msgspec.json.encode(LAYOUT), str(tmp_path), address),
        world_size=LAYOUT.world_size,
        timeout=120,
    )
    assert told[0][0] == "0 groups"
    assert len(set(told[0][1:])) == 3
    assert all(each.endswith(" () 1") for each in told[0][1:])
    assert all(each == told[0] for each in told)


TWO = config_of({"mesh": {"cp": 2, "cp_heads": 1}, **PLANNED}, train=TRAIN)


def rank_plans_otherwise(encoded: bytes, directory: str, address: str, how: str) -> str:
    """Let one of two ranks make another plan, or none; what all of them say."""
    trainer = _trainer(encoded, directory, address)
    planning = trainer.planning
    assert isinstance(planning, StepPlanning)
    plan = planning.planner.plan

    def other(lengths: list[int]) -> StepPlan:
        if how == "fails":
            raise RuntimeError("no such plan")
        made = plan(lengths)
        teams = [replace(team, microbatches=team.microbatches[::-1]) for team in made.teams]
        return replace(made, teams=tuple(teams))

    if trainer.mesh.rank == 1:
        planning.planner.plan = other  # type: ignore[assignment, method-assign]
    try:
        trainer.train_step()
    except (DataError, PeerError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutdown()
    return "trained"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("differs", ["DataError: ranks [1] must plan the step as all others do"] * 2),
        ("fails", ["PeerError: rank 1", "RuntimeError: no such plan"]),
    ],
)
def test_a_rank_that_plans_otherwise_is_named_on_all(
    tmp_path: Path, how: str, said: list[str]
) -> None:
    address = prepare_run(TWO, tmp_path)
    run = (rank_plans_otherwise, msgspec.json.encode(TWO), str(tmp_path), address, how)
    found = run_distributed(*run, world_size=2, timeout=60)
    assert all(each.startswith(expected) for each, expected in zip(found, said, strict=True)), found


def rank_finds_no_plan(encoded: bytes, directory: str, address: str) -> list[int]:
    """Let no partition fit; the documents of each microbatch, and of each sequence."""
    trainer = _trainer(encoded, directory, address)
    planning = trainer.planning
    assert isinstance(planning, StepPlanning)

    def refuses(lengths: list[int]) -> StepPlan:
        raise ConfigError(f"{len(lengths)} documents")

    planning.planner.plan = refuses  # type: ignore[assignment, method-assign]
    trainer.train_step()
    assert isinstance(trainer.planned, PlannedStep)
    (team,) = trainer.planned.plan.teams
    of_sequence: dict[int, list[int]] = {}
    for index, piece in enumerate(trainer.planned.pieces):
        of_sequence.setdefault(piece.sequence, []).append(index)
    same = [list(each.documents) for each in team.microbatches] == [*of_sequence.values()]
    trainer.close()
    return [len(team.microbatches), same]


def test_documents_that_no_partition_fits_go_by_sequences(tmp_path: Path) -> None:
    address = prepare_run(TWO, tmp_path)
    run = (rank_finds_no_plan, msgspec.json.encode(TWO), str(tmp_path), address)
    found = run_distributed(*run, world_size=2, timeout=60)
    assert found == [[TWO.train.global_batch_size, True]] * 2
