"""`hp step-plan`: what other rules do beside what is planned."""

from pathlib import Path

import pytest

from hp_packing import from_text
from hp_packing.generators import draw
from hp_train.cli import main

K = 1024


def test_the_command_compares_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, svg, text = tmp_path / "lengths", tmp_path / "plan.svg", tmp_path / "plan.txt"
    path.write_text("\n".join(map(str, draw("mock", tokens=600 * K, longest=8 * K, seed=0))))
    sizes = "--stages 2 --ranks 4 --degree 2 --tokens 262144 --pack 32768 --memory 65536"
    arguments = ["step-plan", "llama-3.1-8b", *sizes.split()]
    files = ["--lengths", str(path), "--svg", str(svg), "--plan", str(text)]
    assert main([*arguments, *files]) == 0
    shown = capsys.readouterr().out
    assert "2 batches of 262144 tokens" in shown
    for rule in ("static packs, 1F1B", "Megatron's rule", "greedy", "planned", "bound"):
        assert rule in shown
    assert svg.read_text().startswith("<svg")
    assert from_text(text.read_text()).ranks_per_team == 4
    assert main([*arguments, "--distribution", "mock", "--batches", "1", "--json"]) == 0
    assert '"rule": "planned"' in capsys.readouterr().out
    assert main([*arguments, "--degree", "3"]) != 0
    assert main([*arguments, "--pack", "999999"]) != 0
