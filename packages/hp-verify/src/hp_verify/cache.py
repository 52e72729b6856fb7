"""Recordings of references, kept in a folder, and used again where nothing has changed.

A kept recording is one file, by the name of what was asked: the reference's command, the request to
it and the minutes. It appears in one step, in place of an older one, and has checksums: a reader
sees a whole file or none, whoever writes. It says what it depends on: digests of the files that the
reference's processes have opened, but for those that they had written, and of those that its
command names; what is installed where their libraries lie; the interpreter, the processor and the
environment. If one of these is another one now, the reference runs anew, and says which.
"""

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from zipfile import ZipFile

import msgspec

from hp_base.atomic_write import closed_at_end, remove_unfinished, replacing
from hp_base.errors import told
from hp_base.folder import open_named
from hp_verify.budget import Budget
from hp_verify.comparing.compare import Floor, with_floor
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.opened import OPENED

_HEAD = "kept.json"
_DIGITS = 64
_ALL = "*.dist-info"
_SITES = ("site-packages", "dist-packages")
_OF_A_RUN = (
    *("ACTIONS_", "BUILDKITE", "BUILD_", "CI_", "GITHUB_", "GITLAB_", "INPUT_", "JENKINS_"),
    *(
        "RUNNER_",
        "HP_VERIFY_",
        "PYTEST_",
        "INVOCATION_",
        "JOURNAL_",
        "SSH_",
        "SYSTEMD_",
        "XDG_",
        "_",
    ),
    *("COLUMNS", "HOSTNAME", "LINES", "OLDPWD", "PS1", "PWD", "SHLVL", "TERM", "TMPDIR"),
)
"""How environment variables begin that are of a run or a terminal: no number depends on them."""

_OF_PROCESSOR = re.compile(r"^(?:model name|flags|CPU part|Features)\b.*", re.MULTILINE)


class Kept(msgspec.Struct, frozen=True):
    """Describes a kept recording.

    Attributes:
        seconds: Seconds that the first run took.
        facts: Name of what is no file -> digest of its value.
        inputs: File -> digest of its content; "" where there is none.
        versions: Library that the reference used -> version.
    """

    seconds: float = 0.0
    facts: dict[str, str] = {}
    inputs: dict[str, str] = {}
    versions: dict[str, str] = {}


def file_of(*asked: object) -> str:
    """Return the name of the file for the recording that was asked for by such values."""
    return f"{hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]}.kept"


@dataclass(slots=True)
class Cache:
    """Keeps the recordings of one reference.

    Attributes:
        path: File for them, see `file_of`.
        command: The reference.
        tell: Called with a line about what is done.
        kept: Description of the recordings.
    """

    path: Path
    command: Sequence[str]
    tell: Callable[[str], object]
    kept: Kept = field(default_factory=Kept)

    def with_floor(
        self, runs: Path, record: Callable[[str, int], Recording], budget: Budget
    ) -> tuple[Recording, Floor]:
        """Take a reference and what rounding explains from the file; else run it, and keep both.

        Args:
            runs: An empty folder for the recordings of its runs, a folder each.
            record: Runs it, see `hp_verify.comparing.compare.with_floor`.
            budget: Minutes; learns how long the reference has taken.
        """
        if not (reason := self._take(runs)):
            budget.seconds["reference"] = self.kept.seconds
            self.tell(f"reference: not run, it is kept as {self.path.name}")
            others = sorted(runs.glob("reference-*"))
            return with_floor(lambda name, _: join(runs / name), range(1, len(others) + 1))
        self.tell(f"reference: is run and kept, {reason}")
        began = time.time_ns()
        found = with_floor(record, budget.seeds())
        try:
            self._keep(runs, began, budget.seconds["reference"])
        except OSError as error:
            self.tell(f"note: the reference is not kept: {told(error, 120)}")
        return found

    def _take(self, runs: Path) -> str:
        """Copy what is kept into a folder; return the reason why not; empty: it was."""
        try:
            with closed_at_end(open_named(self.path)) as descriptor:
                if os.pread(descriptor, _DIGITS, 0) != _digest_of(descriptor, _DIGITS):
                    return "it is damaged"
            with ZipFile(self.path) as archive:
                self.kept = msgspec.json.decode(archive.read(_HEAD), type=Kept)
                facts, files = _facts(), self.kept.inputs.items()
                changed = {name for name, _ in facts.items() ^ self.kept.facts.items()}
                changed |= {name for name, digest in files if _digest(Path(name)) != digest}
                if changed:
                    return f"{min(changed)} has changed"
                archive.extractall(runs)
        except FileNotFoundError:
            return "it was not yet"
        except Exception as error:  # noqa: BLE001 - whatever damage leads to
            return f"it is damaged: {told(error, 120)}"
        return ""

    def _keep(self, runs: Path, began: int, seconds: float) -> None:
        opened, made = _opened(runs / "reference")
        places = {*opened, *_named(self.command)} - made
        libraries = {path for path in places if path.parent.name in _SITES}
        files = {path for path in places - libraries if not path.is_relative_to(runs)}
        if late := [path for path in files if path.exists() and path.stat().st_mtime_ns >= began]:
            self.tell(f"note: the reference is not kept: {late[0]} changed while it ran")
            return
        folders = {path.parent / _ALL for path in libraries}
        here, used = Path.cwd(), {path.stem.lower() for path in libraries}
        names = {path: path.relative_to(here) for path in files if path.is_relative_to(here)}
        installed = [p.stem.partition("-") for f in folders for p in f.parent.glob(_ALL)]
        self.kept = Kept(
            seconds,
            _facts(),
            {str(names.get(path, path)): _digest(path) for path in files | folders},
            {name: version for name, _, version in installed if name.lower() in used},
        )
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        with (
            closed_at_end(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as directory,
            replacing(directory, self.path.name) as file,
        ):
            file.write(bytes(_DIGITS))
            with ZipFile(file, "w", strict_timestamps=False) as archive:
                archive.writestr(_HEAD, msgspec.json.encode(self.kept))
                for path in runs.rglob("*"):
                    archive.write(path, path.relative_to(runs))
            file.flush()
            os.pwrite(file.fileno(), _digest_of(file.fileno(), _DIGITS), 0)
        file.close()


def _facts() -> dict[str, str]:
    """Return digests of all that counts and is no file: names of variables, and no values."""
    found = {"Python": sys.version}
    if (file := Path("/proc/cpuinfo")).exists():
        lines = _OF_PROCESSOR.findall(file.read_text(encoding="utf-8"))
        found["the processor"] = "\n".join(sorted({*lines}))
    counts = {name: text for name, text in os.environ.items() if not name.startswith(_OF_A_RUN)}
    found |= {f"the environment variable {name}": text for name, text in counts.items()}
    return {name: hashlib.sha256(os.fsencode(value)).hexdigest() for name, value in found.items()}


def _opened(folder: Path) -> tuple[set[Path], set[Path]]:
    """Return the files that processes of a run have opened, and of these those that it has made."""
    texts = [os.fsdecode(path.read_bytes()) for path in folder.glob(f"{OPENED}-*")]
    notes = [note for text in texts for note in text.split("\0") if note]
    made = {Path(note[1:]) for note in notes if note.startswith("w")}
    return {Path(note[1:]) for note in notes}, made


def _named(command: Sequence[str]) -> Iterator[Path]:
    """Yield the files that a command names, and all files in folders that it names."""
    words = [shutil.which(command[0]) or "", *re.split(r"[\s=;]+", " ".join(command))]
    for path in (Path(word).absolute() for word in words if word):
        with suppress(OSError):  # such as a name that is too long
            is_around = path.is_dir() and Path.cwd().is_relative_to(path)
            inside = path.rglob("*") if path.is_dir() and not is_around else [path]
            yield from (each for each in inside if each.is_file())


def _digest(path: Path) -> str:
    """Return a digest of a file, or of names and versions of all that is installed in a folder."""
    if path.name == _ALL:
        names = sorted(each.name for each in path.parent.glob(_ALL))
        return hashlib.sha256("\n".join(names).encode()).hexdigest()
    with suppress(OSError, ValueError), closed_at_end(open_named(path)) as descriptor:
        return _digest_of(descriptor).decode()
    return ""


def _digest_of(descriptor: int, begin: int = 0) -> bytes:
    """Return a digest of a file from a byte on, in `_DIGITS` digits."""
    with FileIO(descriptor, closefd=False) as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest().encode()
