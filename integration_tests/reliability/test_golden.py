"""Checkpoints that releases have written load with what is here now, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hp_checkpoint import Checkpoint, __version__, decode_extra
from integration_tests.reliability.golden import (
    CORPUS,
    DIGESTS,
    EXTRA,
    FOLDER,
    READERS,
    STEPS,
    digests,
    hp,
    tensors,
)

VERSIONS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
MOST_BYTES = 200_000
"""Of the golden checkpoints of a release."""

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_every_release_has_its_golden_checkpoints_which_are_small() -> None:
    log = Path(__file__).parents[2] / "packages" / "hp-checkpoint" / "CHANGELOG.md"
    released = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", log.read_text(), re.MULTILINE)
    assert {*released, __version__} == {*VERSIONS}
    for version in VERSIONS:
        files = [path for path in (FOLDER / version).rglob("*") if path.is_file()]
        assert 10_000 < sum(file.stat().st_size for file in files) < MOST_BYTES
        assert {path.name for path in (FOLDER / version).iterdir()} == {*READERS, DIGESTS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", READERS)
def test_all_tensors_are_what_was_written(version: str, kind: str) -> None:
    folder = FOLDER / version
    found = digests(READERS[kind](folder / kind))
    assert len(found) > 10
    assert found == json.loads((folder / DIGESTS).read_text())[kind]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_store_has_the_values_and_what_was_saved_beside_them(version: str) -> None:
    store = FOLDER / version / "store"
    written = digests(tensors())
    assert {name: written[name] for name in digests(READERS["store"](store))} == written
    manifest = Checkpoint.open(store).manifest
    assert (manifest.step, manifest.world_size) == (STEPS, 2)
    assert decode_extra(manifest.extra) == EXTRA


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_goes_on_in_another_layout(version: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / version / "run", tmp_path / "run")
    layout = ("--mesh.dp_replicate", "1", "--mesh.ep", "1")
    said = hp("train", "--resume", "run", "--train.steps", "3", *layout, folder=tmp_path)
    assert f"step-{STEPS:08d}" in said
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if "loss" in json.loads(row)] == [3]


@pytest.mark.parametrize("version", VERSIONS)
def test_exports_come_in_again(version: str, tmp_path: Path) -> None:
    folder = FOLDER / version
    (tmp_path / CORPUS).touch()  # the text of the run, which nobody reads again
    hp("import-dcp", str(folder / "dcp"), "again", folder=tmp_path)
    known = json.loads((folder / DIGESTS).read_text())
    assert digests(READERS["run"](tmp_path / "again")) == known["run"]
    hp("import-hf", str(folder / "hugging_face"), "--out", "imported.toml", folder=tmp_path)
    assert "num_experts = 2" in (tmp_path / "imported.toml").read_text()
