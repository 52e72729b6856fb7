"""Entry points: a trainer that records itself, and names that a package knows of checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hp_verify import compare_checkpoints
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.request import Request, environment

# What a package of somebody's would install: a trainer, its recorder, and other names.
TRAINER = """
import torch

def train(rate):
    weight = torch.ones(3)
    for step in range(2):
        weight = weight - rate * weight
        after_step(step, weight)

def after_step(step, weight):
    pass
"""
RECORDER = """
from pathlib import Path
from hp_verify.recording import events as ev
from hp_verify.recording.digests import digest_of
from hp_verify.recording.notes import log_of

def listen(module, request):
    log = log_of(Path(request.folder), 0, 1)

    def noted(step, weight):
        pieces = digest_of(weight, ((0, 3),)).pieces()
        log.add(ev.Event(step + 1, ev.WEIGHT, "weight", (3,), "float32", pieces))
        log.flush()

    module.after_step = noted
"""
NAMES = """
from hp_verify.files.made import Made

def published(source, found):
    return {
        f"theirs.{name}": Made(made.shape, made.parts, lambda made=made: made.read() * 2, "doubled")
        for name, made in found.items()
    }
"""
ENTRY_POINTS = """
[hp_verify.trainers]
somebodys_trainer = somebodys_recorder:listen
[hp_verify.names]
somebody = somebodys_names:published
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of this process and of its jobs, in which the package is installed."""
    folder = tmp_path / "installed"
    (folder / "somebodys-1.0.dist-info").mkdir(parents=True)
    (folder / "somebodys-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "somebodys-1.0.dist-info" / "METADATA").write_text("Name: somebodys\nVersion: 1.0\n")
    for name, text in (("trainer", TRAINER), ("recorder", RECORDER), ("names", NAMES)):
        (folder / f"somebodys_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    paths = str(folder), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return folder


@pytest.mark.usefixtures("package")
def test_a_trainer_that_records_itself_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Its first line imports torch: the recorder begins while the trainer is being imported."""

    def recorded(rate: float) -> Recording:
        request = Request(str(tmp_path / f"rate-{rate}"), steps=2)
        Path(request.folder).mkdir()
        program = f"import somebodys_trainer as t; t.train({rate})"
        command = [sys.executable, "-c", program]
        subprocess.run(command, env=environment(request), timeout=60, check=True)
        return join(Path(request.folder))

    expected = recorded(0.25)

    comparison = compare(recorded(0.5), expected, Floor(expected, []))

    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.phase) == (1, "weight")
    assert comparison.first.name == "weight"
    assert 0.1 < comparison.first.error < 1  # a third, as far as digests tell
    assert comparison.num_steps == 2


@pytest.mark.usefixtures("package")
def test_names_that_a_package_knows_are_found_by_its_entry_point(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3)
    for name, tensors in (("a", {"w": values}), ("b", {"theirs.w": values * 2})):
        (tmp_path / name).mkdir()
        save_file(tensors, str(tmp_path / name / "model.safetensors"))

    found = compare_checkpoints(tmp_path / "a", tmp_path / "b")

    assert found.is_equal, found
    assert found.made == {"doubled": 1}
