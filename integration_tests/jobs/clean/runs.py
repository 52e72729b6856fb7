"""Clean jobs under the recorder beside their references, and bugs seeded in them."""

import os
import re
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch.distributed as dist

from hp_verify.comparing.compare import Floor, compare, with_floor
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison, Verdict
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.begin import begin
from hp_verify.recording.request import Request
from integration_tests.jobs.clean.job import Clean, Seeded, World
from integration_tests.jobs.clean.mutations import mutate
from integration_tests.jobs.demo.found import FailedError
from integration_tests.models.architectures.forks import run_ranks

EQUAL, ACCUSED, NOTHING, FAILED = "equal", "accused", "not comparable", "failed"
SECONDS = 240.0
"""Most that one run may take; it is a second where cores are idle."""
_SHOWN = 4


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was told of a seeded bug.

    Attributes:
        name: Name of the bug.
        is_found: Whether the job was called different.
        is_named: Whether the tensor and the kind are those that had to be named.
        first: The first difference.
        likely: Its likely causes.
        reason: Reason why the job failed, if it did.
    """

    name: str
    is_found: bool = False
    is_named: bool = False
    first: str = ""
    likely: tuple[str, ...] = ()
    reason: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of a job.

    Attributes:
        name: Name of the job.
        style: Style of the job.
        origin: Origin of the job.
        state: `EQUAL`, `ACCUSED`, `NOTHING` or `FAILED`.
        first: The first difference.
        likely: Its likely causes.
        compared: Tensors and numbers that were compared.
        unaligned: Some of those that were not, each with the reason.
        num_unaligned: How many were not.
        reason: Reason why the job failed, if it did.
        bugs: What was told of its bugs.
        seconds: Seconds that all took.
    """

    name: str
    style: str
    origin: str
    state: str
    first: str = ""
    likely: tuple[str, ...] = ()
    compared: int = 0
    unaligned: dict[str, str] = {}
    num_unaligned: int = 0
    reason: str = ""
    bugs: tuple[Told, ...] = ()
    seconds: float = 0.0


def judge(job: Clean, *, bugs: bool = True) -> Found:
    """Compare a job on two ranks with its reference; then with each of its bugs.

    Args:
        job: The job.
        bugs: Whether its bugs are looked for, too.
    """
    began = time.monotonic()
    with TemporaryDirectory(prefix="hp-clean-") as made:
        folder = Path(made)
        try:
            expected, floor = with_floor(
                lambda name, seed: _recorded(folder / name, job, "", ranks=1, disturb=seed)
            )
            seen = compare(_recorded(folder / "job", job, "", ranks=2), expected, floor)
        except FailedError as error:
            found = _found(job, FAILED, Comparison(), reason=str(error))
            return msgspec.structs.replace(found, seconds=time.monotonic() - began)
        told = [
            _told(folder, job, bug, expected, floor, index)
            for index, bug in enumerate(job.bugs if bugs else ())
        ]
    states = {Verdict.EQUAL: EQUAL, Verdict.DIFFERENT: ACCUSED, Verdict.NOT_COMPARABLE: NOTHING}
    found = _found(job, states[seen.verdict], seen)
    return msgspec.structs.replace(
        found, bugs=tuple(told), seconds=round(time.monotonic() - began, 1)
    )


def _found(job: Clean, state: str, seen: Comparison, *, reason: str = "") -> Found:
    return Found(
        name=job.name,
        style=job.style,
        origin=job.origin,
        state=state,
        first=str(seen.first or ""),
        likely=tuple(explain(seen)),
        compared=seen.num_compared,
        unaligned=dict([*seen.unaligned.items()][:_SHOWN]),
        num_unaligned=len(seen.unaligned),
        reason=reason,
    )


def _told(  # noqa: PLR0917
    folder: Path, job: Clean, bug: Seeded, expected: Recording, floor: Floor, index: int
) -> Told:
    try:
        actual = _recorded(folder / f"bug-{index}", job, bug.name, ranks=2)
    except FailedError as error:
        return Told(name=bug.name, reason=str(error))
    seen = compare(actual, expected, floor)
    first, likely = seen.first, tuple(explain(seen))
    if first is None or seen.is_excused:
        return Told(name=bug.name, first=str(first or ""))
    is_named = (
        re.fullmatch(bug.phase or ".*", first.phase) is not None
        and re.search(bug.where, first.name) is not None
        and bug.likely in " ".join(likely)
    )
    return Told(name=bug.name, is_found=True, is_named=is_named, first=str(first), likely=likely)


def _recorded(folder: Path, job: Clean, bug: str, *, ranks: int, disturb: int = 0) -> Recording:
    reference = "" if folder.name == "reference" else str(folder.with_name("reference"))
    request = Request(str(folder), reference=reference, steps=job.steps, disturb=disturb)
    work = partial(_work, request, job, bug, ranks)
    if reason := run_ranks(work, size=ranks, folder=folder, seconds=SECONDS):
        raise FailedError(reason)
    return join(folder)


def _work(request: Request, job: Clean, bug: str, ranks: int) -> None:
    """Be a rank; what changes the job from outside is there before the recorder."""
    rank = int(os.environ.get("RANK", "0"))
    if job.has_group and ranks == 1:
        place = (Path(request.folder) / "store").as_uri()
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    mutate(bug, is_last=rank == ranks - 1)
    with closing(begin(request)):
        job.train(World(rank, ranks, bug, job.form))
