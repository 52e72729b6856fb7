"""``hp-schedule search``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hp_schedule import ModelCosts, from_json, simulate, validate
from hp_schedule.cli import main

MODEL = (
    "--forward 1 --input-grad 1 --weight-grad 1 --first-scale 0.7 --last-scale 1.3 --latency 0.05"
)


def test_the_schedule_is_printed_as_json_and_what_is_known_of_it_beside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"search --ranks 4 --microbatches 7 --virtual 1,2,4 {MODEL} --memory 4 --json"
    assert main([*command.split(), "--candidates", "20"]) == 0
    output, notes = capsys.readouterr()
    schedule = from_json(output)
    validate(schedule).raise_if_failed()
    model = ModelCosts(first_scale=0.7, last_scale=1.3, latency=0.05)
    simulation = simulate(schedule, model.of_stages(4, schedule.num_stages))
    assert max(simulation.peak_activations) <= 4
    assert notes.startswith(f"makespan {simulation.makespan:g}, ")
    assert "20 candidates" in notes


def test_messages_and_a_file_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    command = "search --ranks 2 --microbatches 3 --candidates 3 --communication --json --output"
    assert main([*command.split(), str(file)]) == 0
    assert main(["check", str(file), "--communication"]) == 0
    assert "valid (with messages)" in capsys.readouterr().out


def test_messages_take_no_time_from_the_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    command = f"search --ranks 4 --microbatches 7 {MODEL} --candidates 9 --communication --json"
    assert main([*command.split(), "--output", str(file)]) == 0
    makespan = capsys.readouterr().err.split()[1].rstrip(",")
    assert main(["simulate", str(file), *MODEL.split(), "--json"]) == 0
    assert f"{json.loads(capsys.readouterr().out)['makespan']:g}" == makespan


def test_simulate_prices_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    command = f"search --ranks 2 --microbatches 4 {MODEL} --candidates 5 --json --output {file}"
    assert main(command.split()) == 0
    makespan = capsys.readouterr().err.split()[1].rstrip(",")
    assert main(["simulate", str(file), *MODEL.split(), "--json"]) == 0
    assert f"{json.loads(capsys.readouterr().out)['makespan']:g}" == makespan


def test_without_json_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    command = "search --ranks 2 --microbatches 2 --virtual 1 --candidates 1"
    assert main(command.split()) == 0
    assert "rank" in capsys.readouterr().out


def test_backwards_stay_whole_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    command = "search --ranks 2 --microbatches 3 --candidates 5 --whole-backward --json"
    assert main(command.split()) == 0
    assert '"W"' not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--virtual 1,x", "(1,x) must be numbers as in 1,2,4"),
        ("--memory 0.5", "memory_limit (0.5) must be >= "),
        ("--virtual 0", "virtual (0) must be >= 1"),
        ("--communication --forward 0", "--forward and --input-grad (0) must be > 0"),
    ],
)
def test_bad_options_are_answered_in_one_line(options: str, message: str) -> None:
    command = [sys.executable, "-m", "hp_schedule.cli", "search", "--ranks", "2"]
    command += ["--microbatches", "2", *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_retention_fits_less_memory_in_less_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "search --ranks 3 --microbatches 5 --memory 1.5 --candidates 18 --json"
    costs = "--kept-input 0.05 --recompute 0.9 --host-bandwidth 2"
    times = {}
    for retention in ("", "--retention recompute", "--retention both"):
        file = tmp_path / "plan.json"
        assert main([*f"{command} {costs} {retention} --output".split(), str(file)]) == 0
        capsys.readouterr()
        assert main([*f"simulate {costs} --json".split(), str(file)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert max(found["peak_activations"]) <= 1.5
        times[retention] = found["makespan"]
    assert times["--retention both"] <= times["--retention recompute"] < times[""]
