"""Files of strangers: commands of `hp` that meet them, and what a good answer is.

A series makes its cases, this runs them: every case is made in a folder of its own, the command
runs in a process that is forked from this one, and nothing outside of that folder may change.

    failures, notes = meet_all(cases, folder)

A program that calls this and has imported torch gives every case a start in milliseconds; one that
has not shows that the answer needs no torch. `run_program` and `tell` join such a program and the
series of `python -m integration_tests.reliability`.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hp_train.cli import main
from integration_tests.reliability.outcome import Outcome

REFUSED = (2, 3, 4)
"""Statuses of unusable configs, data and checkpoints, see docs/how-to/stop-and-resume.md."""

_LONGEST_LINE = 400
_SECONDS = 60.0
_LEAVING_SECONDS = 5.0
_LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class Case:
    """One thing to meet.

    Attributes:
        what: Names it, with what is needed to repeat it.
        make: Puts it into an empty folder, which the command may change, and returns the arguments
            of `hp`. The second argument is a folder of somebody's files that must stay as they
            are, for links to point to; see `their_files`.
        refusals: Statuses that are right for a refusal.
        accepted: Text that the answer must hold where the command does its work with status 0;
            None: it must be refused. Empty: nothing need be said.
        names: Text that the line of a refusal must hold, such as the name of the file.
        writes: Whether the command may change the folder of the case.
        begins: Whether the command may print what it does before it refuses.
        env: Variables to add.
    """

    what: str
    make: Callable[[Path, Path], Sequence[str]]
    refusals: Collection[int] = REFUSED
    accepted: str | None = None
    names: str = ""
    writes: bool = True
    begins: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a command answered.

    Attributes:
        status: Exit status; negative: killed by that signal.
        out: Standard output.
        err: Standard error.
        seconds: Wall time.
    """

    status: int
    out: str
    err: str
    seconds: float


def problem_of(answer: Answer, case: Case) -> str:
    """What is wrong with an answer; empty: nothing.

    A refusal is one printable line on standard error that begins with ``error: `` and a documented
    status; a second line may tell where the traceback was written.
    """
    status, out, err = answer.status, answer.out, answer.err
    if status == 0:
        if case.accepted is None:
            return f"accepted: {out[-200:]!r} {err[-200:]!r}"
        return "" if case.accepted in out + err else f"not said: {case.accepted!r}: {out[-300:]!r}"
    lines = [line for line in err.splitlines() if not line.startswith("traceback: ")]
    printed = out and not case.begins
    is_line = len(lines) == 1 and lines[0].startswith("error: ")
    if status not in case.refusals or not is_line or printed:
        return f"status {status}, {len(lines)} lines: {err[-400:]!r} {out[:100]!r}"
    if len(lines[0]) > _LONGEST_LINE:
        return f"{len(lines[0])} characters: {lines[0][:200]!r}"
    if not lines[0].isprintable():
        return f"not printable: {lines[0][:200]!r}"
    return "" if case.names in lines[0] else f"{case.names!r} is not named: {lines[0]!r}"


def meet_all(cases: Sequence[Case], folder: Path) -> tuple[list[str], list[str]]:
    """Run every case.

    Args:
        cases: Any number, at least one.
        folder: Empty; for what they need.

    Returns:
        A line for each case that went wrong; figures of all.
    """
    theirs = their_files(folder / "theirs")
    failures, seconds, accepted = [], [], 0
    for number, case in enumerate(cases):
        answer, changed = meet(case, folder, theirs)
        seconds.append(answer.seconds)
        accepted += answer.status == 0
        if problem := problem_of(answer, case) or changed:
            failures.append(f"case {number}, {case.what}: {problem}")
    median = sorted(seconds)[len(seconds) // 2]
    notes = [
        f"{len(cases) - accepted} refused, {accepted} found good after all",
        f"answered in {median * 1e3:.0f} ms (median), {max(seconds):.2f} s at most",
    ]
    return failures, notes


def meet(case: Case, folder: Path, theirs: Path) -> tuple[Answer, str]:
    """Run one case in a new folder, which is removed afterwards.

    Args:
        case: To run.
        folder: Everything in it but the folder of the case must stay as it is.
        theirs: Somebody's files, in `folder`.

    Returns:
        The answer, and what changed that must not; empty: nothing.
    """
    room, here = folder / "case", folder / "here"
    room.mkdir()
    here.mkdir(exist_ok=True)
    try:
        argv = case.make(room, theirs)
        before = snapshot(folder, without=room if case.writes else None)
        answer = ask(argv, here, env=case.env)
        after = snapshot(folder, without=room if case.writes else None)
    finally:
        _remove(room)
    names = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    return answer, f"changed: {', '.join(names[:3])}" if names else ""


def their_files(folder: Path) -> Path:
    """Make files that a link of a stranger may point to, of several kinds and modes."""
    folder.mkdir()
    (folder / "empty-folder").mkdir()
    (folder / "folder").mkdir(mode=0o700)
    (folder / "folder" / "letter.txt").write_text("dear reader,\n" * 40)
    (folder / "secret").write_bytes(bytes(range(256)) * 16)
    (folder / "secret").chmod(0o600)
    (folder / "empty").touch()
    (folder / "link").symlink_to("secret")
    return folder


def snapshot(root: Path, *, without: Path | None = None) -> dict[str, tuple[object, ...]]:
    """What every path below a folder is: kind, mode, owner, times, size, target or digest."""
    found: dict[str, tuple[object, ...]] = {}
    for path in _below(root, without):
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        about = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns)
        found[str(path.relative_to(root))] = (*about, status.st_size, content)
    return found


def _below(folder: Path, without: Path | None = None) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path != without:
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from _below(path, without)


def ask(argv: Sequence[str], folder: Path, *, env: Mapping[str, str]) -> Answer:
    """Run a command of `hp` in a process forked from this one, in an empty folder.

    What it prints stands in unnamed files meanwhile, so the folder stays empty unless the command
    writes to it.
    """
    texts = [os.memfd_create(name) for name in ("out", "err")]
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_program(argv, folder, texts, env)
    status = _wait(pid, began + _SECONDS)
    seconds = time.monotonic() - began
    out, err = map(_read, texts)
    if _leaves_processes(pid):
        err += "\nleft a process behind"
    if seconds > _SECONDS:
        err += f"\nstill ran after {_SECONDS:g} s"
    return Answer(status, out, err, seconds)


def _be_the_program(
    argv: Sequence[str], folder: Path, texts: Sequence[int], env: Mapping[str, str]
) -> None:
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(texts, start=1):
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(env)
        status = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(pid: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _leaves_processes(group: int) -> bool:
    """Whether any process of an ended command does not end by itself; then it is ended."""
    deadline = time.monotonic() + _LEAVING_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(_LOOK_SECONDS)
    os.killpg(group, signal.SIGKILL)
    return True


def _read(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, errors="replace") as file:
        return file.read()


def _remove(room: Path) -> None:
    """Remove a folder of which some modes may forbid it."""
    for path in _below(room):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(room)


def run_program(
    module: str, name: str, count: int, *, seed: int, flags: Sequence[str] = ()
) -> Outcome:
    """Run ``python FLAGS -m MODULE COUNT SEED``, a program that ends with `tell`."""
    began = time.monotonic()
    command = [sys.executable, *flags, "-m", module, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        return Outcome(name, count, [done.stderr[-500:]], seconds)
    found = json.loads(done.stdout)
    return Outcome(name, found["cases"], found["failures"], seconds, found["notes"])


def tell(cases: int, failures: Sequence[str], notes: Sequence[str]) -> None:
    """Say on standard output what came of the cases, for `run_program`."""
    sys.stdout.write(json.dumps({"cases": cases, "failures": failures, "notes": notes}))
