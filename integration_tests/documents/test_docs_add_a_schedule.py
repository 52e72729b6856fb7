"""A schedule is added as the page says, one file and its test, and is then everywhere."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from integration_tests.documents.stand_ins import python

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "hp-schedule"
PAGE = ROOT / "docs" / "how-to" / "add-a-schedule.md"
NAME = "one_at_a_time"
COMMAND = ("-m", "hp_schedule.cli")


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the two files of the page."""
    folder = tmp_path_factory.mktemp("added")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE / "src" / "hp_schedule", folder / "hp_schedule", ignore=ignored)
    text = PAGE.read_text()
    generator, test = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for block, name, where in (
        (generator, "generators/naive.py", folder / "hp_schedule" / "generators" / "naive.py"),
        (test, "test_schedule_naive.py", folder / "tests" / "test_schedule_naive.py"),
    ):
        assert f"`{name}`" in text
        where.parent.mkdir(exist_ok=True)
        where.write_text(block)
    return folder


def test_its_own_test_passes(added: Path) -> None:
    assert "1 passed" in python(added, "-m", "pytest", "-q", "tests")


def test_the_tests_of_all_schedules_hold_for_it(added: Path) -> None:
    files = ("generators_exhaustive", "registry", "runtime_named")
    tests = [str(PACKAGE / "tests" / f"test_schedule_{name}.py") for name in files]
    # Not in the registry's: whether its name is public, which is another question.
    chosen = f"{NAME} and not public_function"
    assert "7 passed" in python(added, "-m", "pytest", "-q", "-k", chosen, *tests)


def test_the_command_makes_it_and_proves_and_prices_what_it_made(added: Path) -> None:
    command = partial(python, added, *COMMAND)
    sizes = ("--ranks", "3", "--microbatches", "4")
    command("generate", NAME, *sizes, "--communication", "--json", "-o", "s.json")
    assert "valid (with messages): 3 ranks, 3 stages, 4 microbatches" in command("check", "s.json")
    found = json.loads(command("simulate", "s.json", "--json"))
    # Forward 1, backward 2 of a third of the model each: nothing runs beside anything else.
    assert found["makespan"] == 4 * 3 * 3
    assert found["peak_activations"] == [1, 1, 1]


def test_a_config_can_name_it(added: Path) -> None:
    program = f"""
from hp_base.errors import ConfigError
from hp_trainer.config.options import resolve
from hp_trainer.layout.schedules import training_schedule
from hp_trainer.config.schema import fields
from hp_plan.layouts.space import AXES

print(fields()["pipeline.schedule"].choices[-1])
print("{NAME}" in next(axis for axis in AXES if axis.key == "pipeline.schedule").choices)
given = [("mesh.pp", "2"), ("pipeline.schedule", "{NAME}"), ("pipeline.stages_per_rank", "1")]
config = resolve(None, given, env={{}}).config
print(training_schedule(config.pipeline, num_ranks=2, num_microbatches=3).num_stages)
try:
    resolve(None, [("pipeline.schedule", "one_at_a_tine")], env={{}})
except ConfigError as error:
    print(error)
try:
    resolve(None, [*given[:2], ("pipeline.stages_per_rank", "2")], env={{}})
except ConfigError as error:
    print(error)
"""
    last, is_axis, num_stages, unknown, stages = python(added, "-c", program).splitlines()
    assert (last, is_axis, num_stages) == (NAME, "True", "2")
    assert unknown.endswith(f"u_shape, {NAME}; did you mean {NAME}?")
    assert stages == (f'pipeline.stages_per_rank (2) must be 1 with pipeline.schedule ("{NAME}")')


def test_the_pages_list_it(added: Path) -> None:
    program = f"import json, runpy; c = runpy.run_path({str(ROOT / 'docs' / 'conf.py')!r})\n"
    pages = json.loads(python(added, "-c", f"{program}print(json.dumps(c['myst_substitutions']))"))
    row = f"| `{NAME}` | 1 | one microbatch at a time: the least activations, the largest bubble | "
    assert row in pages["schedules"]
    assert pages["schedule_names"].endswith(f"u_shape, {NAME}")
    assert NAME in pages["one_stage_schedules"]


def test_every_name_that_a_page_takes_from_the_registry_is_there() -> None:
    used = {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"\{\{ (\w+) \}\}", page.read_text())
    }
    program = f"import runpy; print(*runpy.run_path({str(ROOT / 'docs' / 'conf.py')!r})"
    known = python(ROOT, "-c", f"{program}['myst_substitutions'])").split()
    assert used == set(known)
