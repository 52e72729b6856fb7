"""Recordings of references, kept in a folder, and used again where nothing has changed.

A kept recording is one file, by the name of what was asked: the reference's command, the request to
it, the minutes and the version of hp-verify. It appears in one step, in place of an older one, and
has a digest: a reader sees a whole file or none, whoever writes. It says what it depends on:
digests of the files that the reference's processes have opened, but for those that they had
written, and of those that its command names; what is installed where their libraries lie; the
interpreter, the processor and the environment. If one of these is another one now, the reference
runs anew, and says which.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hp_base.errors import told
from hp_base.packs import digest_of, new_pack, opened_pack
from hp_verify.budget import Budget
from hp_verify.comparing.compare import Floor, with_floor
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.opened import OPENED

_HEAD, _SITES = "kept.json", ("site-packages", "dist-packages")
_OF_A_RUN = (
    *("ACTIONS_", "BUILDKITE", "BUILD_", "CI_", "GITHUB_", "GITLAB_", "INPUT_", "JENKINS_"),
    *("RUNNER_", "HP_VERIFY_", "PYTEST_", "INVOCATION_", "JOURNAL_", "SSH_", "SYSTEMD_", "XDG_"),
    *("COLUMNS", "HOSTNAME", "LINES", "OLDPWD", "PS1", "PWD", "SHLVL", "TERM", "TMPDIR", "_"),
)
"""How environment variables begin that are of a run or a terminal: no number depends on them."""
_OF_PROCESSOR = re.compile(r"^(?:model name|flags|CPU part|Features)\b.*", re.MULTILINE)


class Kept(msgspec.Struct, frozen=True):
    """Describes a kept recording.

    Attributes:
        seconds: Seconds that the first run took.
        inputs: File, installed library, setting or variable -> digest; "" where there is none.
    """

    seconds: float
    inputs: dict[str, str]


def kept_or_run(  # noqa: PLR0917
    folder: Path | None,
    asked: tuple[Sequence[str], *tuple[object, ...]],
    runs: Path,
    record: Callable[[str, int], Recording],
    budget: Budget,
    tell: Callable[[str], object],
) -> tuple[Recording, Floor]:
    """Take a reference and what rounding explains from a folder; else run it, and keep both.

    Args:
        folder: Folder of all that is kept; it is made. None: nothing is kept.
        asked: The reference's command, and all else that was asked for.
        runs: An empty folder for the recordings of its runs, a folder each.
        record: Runs it, see `hp_verify.comparing.compare.with_floor`.
        budget: Minutes; learns how long the reference has taken.
        tell: Called with a line about what is done.
    """
    if folder is None:
        return with_floor(record, budget.seeds())
    path = folder / f"{hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:32]}.kept"
    kept, reason = _taken(path, runs)
    if kept is not None:
        budget.seconds["reference"] = kept.seconds
        tell(f"reference: not run, it is kept as {path.name}")
        seeds = range(1, 1 + len([*runs.glob("reference-*")]))
        return with_floor(lambda name, _: join(runs / name), seeds)
    tell(f"reference: is run and kept, {reason}")
    began = time.time_ns()
    found = with_floor(record, budget.seeds())
    try:
        kept = _made(asked[0], runs, budget.seconds["reference"], began)
        with new_pack(path) as archive:
            archive.writestr(_HEAD, msgspec.json.encode(kept))
            for file in runs.rglob("*"):
                archive.write(file, file.relative_to(runs))
    except OSError as error:
        tell(f"note: the reference is not kept: {told(error, 200)}")
    return found


def _taken(path: Path, runs: Path) -> tuple[Kept | None, str]:
    """Copy what is kept into a folder; if it cannot be used, return the reason."""
    try:
        with opened_pack(path) as archive:
            kept = msgspec.json.decode(archive.read(_HEAD), type=Kept)
            now = {name: _digest(name) for name in kept.inputs if name.startswith("/")} | _facts()
            if changed := kept.inputs.items() ^ now.items():
                return None, f"{min(changed)[0]} has changed"
            archive.extractall(runs)
    except FileNotFoundError:
        return None, "it was not yet"
    except Exception as error:  # noqa: BLE001 - whatever damage leads to
        return None, told(error, 200)
    return kept, ""


def _made(command: Sequence[str], runs: Path, seconds: float, began: int) -> Kept:
    """Describe a recording that is to be kept.

    Raises:
        OSError: When what it depends on has changed since it began.
    """
    texts = (os.fsdecode(file.read_bytes()) for file in runs.glob(f"reference/{OPENED}-*"))
    notes = [note for note in "\0".join(texts).split("\0") if note]
    written = {Path(note[1:]) for note in notes if note.startswith("w")}
    places = {Path(note[1:]) for note in notes} | _named(command)
    roots = {place for place in places if place.name in _SITES}
    libraries = {each for root in roots for each in root.glob("*.dist-info")}
    files = {file for file in places - written - roots if not {runs, *roots} & {*file.parents}}
    if late := [file for file in files if file.exists() and file.stat().st_mtime_ns >= began]:
        raise OSError(f"{late[0]} changed while it ran")
    return Kept(seconds, {str(p): _digest(str(p)) for p in files | libraries} | _facts())


def _facts() -> dict[str, str]:
    """Return digests of all that counts and is no file: names of variables, and no values."""
    file = Path("/proc/cpuinfo")
    lines = _OF_PROCESSOR.findall(file.read_text(encoding="utf-8")) if file.exists() else []
    found = {"Python": sys.version, "the processor": "\n".join(sorted({*lines}))}
    for name in (name for name in os.environ if not name.startswith(_OF_A_RUN)):
        found[f"the environment variable {name}"] = os.environ[name]
    return {name: hashlib.sha256(os.fsencode(value)).hexdigest() for name, value in found.items()}


def _named(command: Sequence[str]) -> set[Path]:
    """Return the files that a command names, and all files in folders that it names."""
    words = re.split(r"[\s=;]+", " ".join(command))
    paths = {Path(word).absolute() for word in words if os.path.exists(word)}  # noqa: PTH110
    inside = [p.rglob("*") for p in paths if p.is_dir() and not Path.cwd().is_relative_to(p)]
    return {path for some in (paths, *inside) for path in some if path.is_file()}


def _digest(name: str) -> str:
    """Return a digest of a file; "there" for a folder, whose name tells a library's version."""
    return "there" if Path(name).is_dir() else digest_of(Path(name))
