"""A small part of `nox -s reliability`, in every run of the tests."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.reliability.strangers import (
    Answer,
    Case,
    meet,
    problem_of,
    snapshot,
    their_files,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

ROOT = Path(__file__).parents[2]


def test_what_goes_wrong_is_found_and_got_over(tmp_path: Path) -> None:
    counts = {"kills": 1, "flips": 13, "others": 7, "configs": 8, "reloads": 1}
    counts |= {"rundirs": 7, "mutants": 2, "models": 8, "environments": 0}
    options = [f"--{name}={count}" for name, count in counts.items()]
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.reliability", *options, f"--folder={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        "kills: 1 of 1",
        "damages: 20 of 20",
        "configs: 8 of 8",
        "reloads: 1 of 1",
        "models: 8 of 8",
        "mutants: 12 of 12",
        "run directories: 7 of 7",
    ]
    for line in lines:
        assert f"{line} good" in done.stdout


@pytest.mark.parametrize(
    ("status", "out", "err"),
    [
        (0, "good\n", ""),
        (1, "", "error: x\n"),
        (2, "", "error: x\nand more\n"),
        (2, "", "warning: x\n"),
        (2, "", "error: \x1b[31mx\n"),
        (2, "", f"error: {'x' * 400}\n"),
        (2, "", "error: y\n"),
        (2, "something", "error: x\n"),
        (-9, "", "error: x\n"),
    ],
)
def test_no_bad_answer_passes_for_a_good_one(status: int, out: str, err: str) -> None:
    case = Case("a case", lambda _room, _theirs: [], refusals=(2,), names="x")
    assert problem_of(Answer(2, "", "error: x\ntraceback: file\n", 0.0), case) == ""
    assert problem_of(Answer(status, out, err, 0.0), case) != ""


@pytest.mark.parametrize(
    "change",
    [
        lambda theirs: (theirs / "secret").write_bytes(b""),
        lambda theirs: (theirs / "empty").chmod(0o600),
        lambda theirs: (theirs / "empty-folder" / "new").touch(),
        lambda theirs: (theirs / "folder" / "letter.txt").unlink(),
        lambda theirs: (theirs / "link").unlink() or (theirs / "link").symlink_to("empty"),
    ],
)
def test_whatever_changes_elsewhere_is_noticed(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    theirs = their_files(tmp_path / "theirs")
    before = snapshot(tmp_path)
    assert snapshot(tmp_path) == before
    change(theirs)
    assert snapshot(tmp_path) != before


def test_a_refusal_is_met_in_a_process_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs = their_files(tmp_path / "theirs")
    case = Case("a refusal", lambda _room, _theirs: ["train", "train.steps=none"], names="steps")
    with capfd.disabled():
        answer, changed = meet(case, tmp_path, theirs)
    assert (answer.status, problem_of(answer, case), changed) == (2, "", "")
