"""Cells of the table of models are equal for real architectures, and not with a mistake."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from msgspec.structs import replace

from hp_base.command_line import run_command
from hp_trainer.config.options import build
from hp_transformers.stages.notes import notes
from hp_transformers.stages.proven import read_table
from integration_tests.models.architectures import command
from integration_tests.models.architectures.cells import DIFFERENT, EQUAL, KINDS
from integration_tests.models.architectures.compact import encoded
from integration_tests.models.cells_with_faults import FAULTS

pytestmark = pytest.mark.usefixtures("forked_programs")

HERE = Path(__file__).parent
OWN = HERE / "own_architecture"
ARCHITECTURES = {name: "mixtral" if kind.needs_experts else "llama" for name, kind in KINDS.items()}


def run(folder: Path, *cases: str) -> Mapping[str, Mapping[str, Any]]:
    """Run cells in a process of its own, since ranks are forked; case -> cell."""
    out = folder / "cells.json"
    command = [sys.executable, "-m", "integration_tests.models.cells_with_faults", str(out), *cases]
    subprocess.run(command, check=True, timeout=240)
    return {case: cells[-1] for case, cells in json.loads(out.read_text()).items()}


@pytest.mark.sample("fsdp 2", "pp 2 1f1b", "tp 2")
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_cell_is_equal_and_with_a_mistake_it_is_not(kind: str, tmp_path: Path) -> None:
    case = f"{ARCHITECTURES[kind]}|{kind}"

    cells = run(tmp_path, case, f"{case}|fault")

    assert cells[case]["state"] == EQUAL, cells[case]
    assert cells[case]["error"] <= 1e-12
    assert cells[f"{case}|fault"]["state"] == DIFFERENT, cells[f"{case}|fault"]


def test_each_kind_has_a_mistake_that_it_must_find() -> None:
    assert FAULTS.keys() == KINDS.keys()


@pytest.mark.sample("pp 2 gpipe")
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.needs_experts])
def test_code_from_outside_transformers_goes_through_the_same_table(
    kind: str, tmp_path: Path
) -> None:
    cells = run(tmp_path, f"{OWN}|{kind}")

    assert cells[f"{OWN}|{kind}"]["state"] == EQUAL, cells


def test_the_command_writes_the_table_and_the_page_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["gpt2", "--kinds", "one process", "--results", "kept", "--page", "page.md"]
    ran = subprocess.run(
        [sys.executable, "-m", "integration_tests.models.architectures", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "gpt2: 1 equal" in ran.stdout
    kept = (tmp_path / "kept" / "gpt2.json").stat().st_mtime_ns

    monkeypatch.chdir(tmp_path)
    assert run_command(command.run, arguments) == 0  # nothing is left to be run
    assert (tmp_path / "kept" / "gpt2.json").stat().st_mtime_ns == kept
    assert "# Models of transformers, compared" in (tmp_path / "page.md").read_text()


OF_ANOTHER_RELEASE = """
import sys
from pathlib import Path
from hp_transformers.stages import proven
proven.TABLE = Path(sys.argv[1])
from hp_base.command_line import run_command
from integration_tests.models.architectures.command import run
sys.exit(run_command(run, [*sys.argv[2:], "--new", "--kinds", "one process"]))
"""


def test_a_new_release_is_run_where_it_is_new_or_other_and_says_what_to_do(tmp_path: Path) -> None:
    table = read_table()
    rows = {name: row for name, row in table.rows.items() if name != "gpt2"}
    rows["gptj"] = replace(rows["gptj"], digest="of another release")
    rows["of_yesterday"] = rows["llama"]
    versions = {**table.versions, "transformers": "5.0"}
    path = tmp_path / "proven.json"
    path.write_bytes(encoded(replace(table, rows=rows, versions=versions)))

    def said(*names: str) -> str:
        command = [sys.executable, "-c", OF_ANOTHER_RELEASE, str(path), *names]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    found = said("llama", "gpt2", "gptj")
    assert "the table is of 5.0: 1 new, 1 with other code, 1 gone" in found
    for line in ("new: gpt2", "other code: gptj", "gone: of_yesterday", "gpt2: 1 equal", "gptj: 1"):
        assert f"\n{line}" in found
    assert "\nllama: " not in found
    assert "to do: look into every cell that is different or failed" in found
    assert "--new --write --page" in found
    assert "to do: " not in said("llama")


def test_the_table_that_comes_along_has_no_cell_that_is_different() -> None:
    table = read_table()
    different = {
        (name, kind): cell
        for name in table.rows
        for kind, cell in table.cells(name).items()
        if isinstance(cell, str) and cell.startswith(DIFFERENT)
    }

    assert not different


def test_the_first_lines_of_a_run_say_what_was_never_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    config = build({"model.transformers": str(tmp_path)})

    assert notes(config) == ["warning: of_tomorrow was never compared with transformers"]


def test_an_architecture_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command.run, ["no-such-model"]) == 2
    assert "must be a causal model of transformers, or a folder" in capsys.readouterr().err
