"""Recordings of references that are kept: used again, and never where something has changed."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from hp_verify import verify
from hp_verify.budget import Budget
from hp_verify.cache import kept_or_run
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.opened import VARIABLE
from hp_verify.recording.request import SITE, Request

pytestmark = pytest.mark.usefixtures("forked_programs")

PATHS = os.environ.get("PYTHONPATH", "")
LAYERS = """
import torch
def made():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
"""
JOB = """
import os, pathlib, sys, torch
import own_layers
here = pathlib.Path(__file__).parent
with (here / f"{sys.argv[1]}.ran").open("a") as file:
    file.write("x")
model = own_layers.made()
rate = float((here / "rate.txt").read_text())
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for _ in range(2):
    x = torch.randn(16, 8)
    (model(x).square().mean() * float(sys.argv[2])).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a reference, as they are before they are kept."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "job.py").write_text(JOB)
    (folder / "own_layers.py").write_text(LAYERS)
    (folder / "rate.txt").write_text("0.1")
    command = [sys.executable, str(folder / "job.py"), "one", "1"]
    verify(command, command, keep=folder / "kept", cache=folder / "cache")
    for name in ("job", "job-again"):
        shutil.rmtree(folder / "kept" / name, ignore_errors=True)
    return folder / "kept"


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


class Reference:
    """A reference whose runs are copied from those of another, and counted.

    Args:
        recorded: Folder of the runs.
        folder: Empty folder, which is made.
        inputs: Files that its processes have opened.
        made: Files that they have written first.
    """

    def __init__(
        self, recorded: Path, folder: Path, inputs: list[Path], made: list[Path] | None = None
    ) -> None:
        self.recorded, self.folder, self.num_runs, self.told = recorded, folder, 0, list[str]()
        self.notes = [f"r{path}\0" for path in inputs] + [f"w{path}\0" for path in made or []]
        self.command = ["python", "job.py"]
        self.while_it_runs: Callable[[], object] = lambda: None
        folder.mkdir(exist_ok=True)

    def taken(self, *asked: object) -> Recording:
        """Take it from the cache, or run it."""
        runs, budget = self.folder / f"runs-{self.num_runs}-{random.random()}", Budget(None, 60.0)
        runs.mkdir()

        def record(run: str, _seed: int) -> Recording:
            shutil.copytree(self.recorded / run, runs / run)
            for notes in (runs / run).glob("opened-*"):
                notes.write_text("".join(self.notes))
            self.num_runs += 1
            self.while_it_runs()
            budget.seconds[run] = 1.0
            return join(runs / run)

        question: tuple[list[str], *tuple[object, ...]] = (self.command, *asked)
        cache, tell = self.folder / "cache", self.told.append
        recording, _ = kept_or_run(cache, question, runs, record, budget, tell)
        assert budget.seconds["reference"] == 1.0
        return recording


def test_a_kept_reference_does_not_run_and_is_the_same(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("1")
    reference = Reference(recorded, tmp_path, [tmp_path / "config", tmp_path / "not there"])

    first, second = reference.taken(), reference.taken()

    assert reference.num_runs == 3
    assert second == first
    assert second.num_steps == 2
    assert reference.told == [
        "reference: is run and kept, it was not yet",
        f"reference: not run, it is kept as {file_in(tmp_path / 'cache').name}",
    ]


@pytest.mark.parametrize("how", ["content", "gone", "new", "library", "environment", "named"])
def test_what_has_changed_is_told_and_the_reference_runs(
    how: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "lib").mkdir(parents=True)
    (site / "lib-1.0.dist-info").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    for path in (tmp_path / "a", tmp_path / "b", model / "weights"):
        path.write_text("1")
    inputs = [tmp_path / "a", tmp_path / "b", tmp_path / "c", site]
    reference = Reference(recorded, tmp_path / "kept", inputs)
    reference.command = ["sh", "-c", f"python job.py --model={model}; true"]
    reference.taken()
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    (tmp_path / "nobody reads it").write_text("1")
    reference.taken()
    assert reference.num_runs == 3

    if how == "content":
        (tmp_path / "a").write_text("2")
    elif how == "gone":
        (tmp_path / "b").unlink()
    elif how == "new":
        (tmp_path / "c").write_text("")
    elif how == "library":
        (site / "lib-1.0.dist-info").rename(site / "lib-1.1.dist-info")
    elif how == "named":
        (model / "weights").write_text("2")
    else:
        monkeypatch.setenv("BATCH", "8")

    reference.taken()
    assert reference.num_runs == 6
    changed = {
        "content": f"{tmp_path / 'a'}",
        "gone": f"{tmp_path / 'b'}",
        "new": f"{tmp_path / 'c'}",
        "library": f"{site / 'lib-1.0.dist-info'}",
        "environment": "the environment variable BATCH",
        "named": f"{model / 'weights'}",
    }
    assert reference.told[-1] == f"reference: is run and kept, {changed[how]} has changed"
    reference.taken()
    assert reference.num_runs == 6


def test_each_question_has_a_file_of_its_own(recorded: Path, tmp_path: Path) -> None:
    reference = Reference(recorded, tmp_path, [])
    for command in (["a", "b"], ["a", "c"], ["a b"]):
        for request in (Request(""), Request("", steps=2), Request("", float64=True)):
            for minutes in (None, 10.0):
                reference.command = command
                reference.taken(request, minutes)
    assert reference.num_runs == 3 * 18
    assert len(list((tmp_path / "cache").iterdir())) == 18


def test_files_that_the_run_has_made_are_no_inputs(recorded: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    reference = Reference(recorded, tmp_path / "kept", [made], [made])
    reference.while_it_runs = lambda: made.write_text("x")
    reference.taken()
    made.unlink()
    reference.taken()
    assert reference.num_runs == 3


def test_a_file_that_changes_while_it_is_read_is_not_relied_on(
    recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("1")
    reference = Reference(recorded, tmp_path / "kept", [tmp_path / "job.py"])
    reference.while_it_runs = lambda: (tmp_path / "job.py").write_text("2")
    reference.taken()
    assert "job.py changed while it ran" in reference.told[-1]
    reference.taken()
    assert reference.num_runs == 6


def test_a_damaged_or_unfinished_file_is_a_miss_and_is_replaced(
    recorded: Path, tmp_path: Path
) -> None:
    reference = Reference(recorded, tmp_path, [])
    expected = reference.taken()
    file = file_in(tmp_path / "cache")
    whole = file.read_bytes()
    draw = random.Random(0)
    places = [draw.randrange(len(whole)) for _ in range(60)]
    places += range(len(whole) - 20, len(whole))
    missed = 0
    for number, place in enumerate(places):
        damaged = whole[:place]  # as of a writer that was killed
        if number % 4:
            flipped = whole[place] ^ (1 << draw.randrange(8))
            damaged = bytes([*whole[:place], flipped, *whole[place + 1 :]])
        file.write_bytes(damaged)
        before = reference.num_runs
        assert reference.taken() == expected
        missed += reference.num_runs > before
    assert missed == len(places)
    assert any("is damaged" in line for line in reference.told)
    before = reference.num_runs
    reference.taken()
    assert reference.num_runs == before


def test_writers_and_readers_do_not_disturb_each_other(recorded: Path, tmp_path: Path) -> None:
    expected = Reference(recorded, tmp_path, []).taken()
    file = file_in(cache := tmp_path / "cache")
    killed = cache / f"{file.name}.{'0' * 32}.tmp"
    killed.write_bytes(b"half")

    def work(number: int) -> list[str]:
        reference = Reference(recorded, tmp_path / str(number), [])
        (tmp_path / str(number) / "cache").symlink_to(cache)  # the same
        for turn in range(6):
            if turn % 2:  # another has taken the place of the one that was read
                file.unlink(missing_ok=True)
            assert reference.taken() == expected
        return reference.told

    with ThreadPoolExecutor(4) as pool:
        told = [line for lines in pool.map(work, range(4)) for line in lines]
    assert not [line for line in told if "damaged" in line or "note" in line]
    assert list(cache.iterdir()) == [file]


def test_where_nothing_can_be_written_it_is_told_and_the_comparison_goes_on(
    recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("in the way")
    reference = Reference(recorded, tmp_path, [])
    assert reference.taken().num_steps == 2
    assert reference.told[-1].startswith("note: the reference is not kept: ")


def test_a_job_is_compared_with_a_kept_reference(recorded: Path, tmp_path: Path) -> None:
    for path in recorded.parent.glob("*.*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "one.ran").unlink()
    told: list[str] = []
    reference = [sys.executable, str(tmp_path / "job.py"), "one", "1"]

    def compared(scale: str) -> str:
        job = [sys.executable, str(tmp_path / "job.py"), "other", scale]
        cache = tmp_path / "cache"
        comparison = verify(job, reference, cache=cache, again=False, tell=told.append)
        assert comparison.versions.keys() >= {"Python", "hp-verify", "torch"}
        return "" if comparison.first is None else comparison.first.phase

    def ran() -> int:
        return len((tmp_path / "one.ran").read_text())

    assert compared("1") == ""
    assert ran() == 3
    assert compared("2") == "gradient"
    assert compared("1") == ""
    assert ran() == 3
    for file in ("own_layers.py", "rate.txt", "job.py"):
        path = tmp_path / file
        path.write_text(f"{path.read_text()}\n")
        before = ran()
        assert compared("1") == ""
        assert ran() == before + 3
        assert f"{file} has changed" in " ".join(told)
        assert compared("1") == ""
        assert ran() == before + 3


def test_files_that_programs_open_are_noted_down(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("VALUE = 1")
    (tmp_path / "in.txt").write_text("1")
    program = """
import os, pathlib, subprocess, sys
import own, msgspec
pathlib.Path("out.txt").write_text("x")
open("out.txt").read(), open(b"in.txt").read(), os.open(pathlib.Path("in.txt"), os.O_RDONLY)
try:
    open("nothing.txt")
except FileNotFoundError:
    pass
os.fork() or (open("child.txt", "a+"), os._exit(0))
os.wait()
if sys.argv[1:] == ["first"]:
    subprocess.run([sys.executable, *sys.argv[:1], "second"], check=True)
"""
    (tmp_path / "program.py").write_text(program)
    notes = tmp_path / "notes"
    notes.mkdir()
    for _ in range(2):  # then its modules are compiled
        subprocess.run(
            [sys.executable, "-s", "program.py", "first"],
            check=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, VARIABLE: str(notes), "PYTHONPATH": f"{SITE}:{PATHS}"},
        )
        files = sorted(notes.iterdir())
        lines = [file.read_text().rstrip("\0").split("\0") for file in files]
        told = {line for some in lines for line in some if str(tmp_path) in line}
        told = {line for line in told if ".pyc." not in line}  # a draft of a compiled module
        assert len(files) == 4
        assert sorted(line.replace(f"{tmp_path}/", "") for line in told) == [
            *("rin.txt", "rnothing.txt", "rown.py", "rprogram.py", "wchild.txt", "wout.txt"),
        ]
        assert any(line.endswith("/site-packages") for line in lines[0])
        for file in files:
            file.unlink()


def test_a_second_look_at_a_kept_reference(recorded: Path, tmp_path: Path) -> None:
    for path in recorded.parent.glob("*.*"):
        shutil.copy(path, tmp_path)
    run = [sys.executable, str(tmp_path / "job.py")]
    for _ in range(2):
        found = verify([*run, "b", "2"], [*run, "a", "1"], cache=tmp_path / "cache")
        assert found.exact is not None
        assert found.exact.actual == pytest.approx(2 * found.exact.expected)
    assert (tmp_path / "a.ran").read_text() == "x" * 5


def test_no_number_depends_on_names_of_a_run(tmp_path: Path, recorded: Path) -> None:
    with patch.dict(os.environ, {"GITHUB_SHA": "1", "PYTEST_CURRENT_TEST": "x", "TERM": "dumb"}):
        reference = Reference(recorded, tmp_path, [])
        reference.taken()
    reference.taken()
    assert reference.num_runs == 3
