"""Costs as JSON, and the command that takes them."""

import json
from pathlib import Path

import pytest

from hp_schedule import (
    Costs,
    costs_from_json,
    costs_to_json,
    from_json,
    measured_costs,
    one_f_one_b,
    simulate,
)
from hp_schedule.cli import main

COSTS = Costs(
    forward=[[1.0, 4.0, 1.0, 1.0]] * 2,
    input_grad=[[1.0, 4.0, 1.0, 1.0], [1.5, 6.0, 1.5, 1.5]],
    weight_grad=[1.0, 0.5],
    activation=0.5,
    latency={(0, 1): 0.25, (1, 0): 0.5},
)


@pytest.mark.parametrize("costs", [Costs(), COSTS, Costs(recompute=[1.0, 2.0], bandwidth=3.0)])
def test_costs_come_back_from_text_as_they_were(costs: Costs) -> None:
    assert costs_from_json(costs_to_json(costs)) == costs


def test_a_recorded_run_becomes_a_profile() -> None:
    schedule = one_f_one_b(2, num_microbatches=4)
    timeline = simulate(schedule, COSTS).timeline
    measured = measured_costs(timeline, num_stages=2, num_microbatches=4, per_microbatch=True)
    again = costs_from_json(costs_to_json(measured))
    assert again.forward == COSTS.forward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "costs must be JSON"),
        ("[]", "costs must be a JSON object"),
        ('{"version": 2}', '"version": 1'),
        ('{"version": 1, "forwards": 1}', r"key \('forwards'\) must be one of forward"),
        ('{"version": 1, "forward": [[[1]]]}', r"forward \(\[1\]\) must be a number"),
        ('{"version": 1, "forward": true}', r"forward \(True\)"),
        ('{"version": 1, "forward": NaN}', r"forward \(nan\)"),
        ('{"version": 1, "forward": -1}', r"forward \(-1\) must be >= 0"),
        ('{"version": 1, "latency": [[0, 1]]}', r"latency \(\[0, 1\]\) must be \[source"),
        ('{"version": 1, "bandwidth": [1]}', r"bandwidth \(\[1\]\) must be a number$"),
        ('{"version": 1, "latency": {"0": 1}}', r"latency \({'0': 1}\) must be a number"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        costs_from_json(text)


def test_the_command_searches_with_costs_of_every_stage_and_microbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.write_text(costs_to_json(COSTS))
    command = f"search --ranks 2 --microbatches 4 --costs {profile} --memory 1 --candidates 30"
    assert main([*command.split(), "--json", "--output", str(plan)]) == 0
    makespan = float(capsys.readouterr().err.split()[1].rstrip(","))
    schedule = from_json(plan.read_text())
    assert schedule.num_stages == 2
    assert simulate(schedule, COSTS).makespan == pytest.approx(makespan)
    assert main(["simulate", str(plan), "--costs", str(profile), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(makespan)
    assert main([*command.split(), "--keep-order", "--json"]) == 0
    output, notes = capsys.readouterr()
    assert float(notes.split()[1].rstrip(",")) >= makespan
    orders = [
        [step.microbatch_index for step in row if step and step.type.value == "F"]
        for row in from_json(output).steps
    ]
    assert orders == [[0, 1, 2, 3]] * 2
    assert main([*command.split(), "--blocking", "--json"]) == 0
    assert float(capsys.readouterr().err.split()[1].rstrip(",")) > makespan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 2 --latency 0.1", "--latency (0.1) must be left out with --costs"),
        ("--ranks 3", "stages of --costs (2) must divide by --ranks (3)"),
        ("--ranks 2 --virtual 2", "len(forward) (2) must equal num_stages (4)"),
        ("--ranks 2 --blocking --retention both --memory 1", "blocking (True) must be left out"),
    ],
)
def test_costs_that_do_not_fit_are_refused_in_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(costs_to_json(COSTS))
    command = f"search --microbatches 4 --costs {profile} --candidates 1 {options}"
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_costs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("{}")
    assert main(f"search --ranks 2 --microbatches 2 --costs {profile}".split()) == 2
    assert capsys.readouterr().err.startswith(f"hp-schedule: {profile}: costs must be")
