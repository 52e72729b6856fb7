"""Runs combinations in ranks that are forked from one process, which has imported the libraries."""

import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hp_verify.comparing.compare import Floor, compare, with_floor
from hp_verify.comparing.recordings import Recording
from integration_tests.jobs.demo.found import FailedError, recorded
from integration_tests.jobs.search.cases import DIFFERENT, EQUAL, REFUSED, Case, Job, Outcome
from integration_tests.models.architectures.forks import prepare, run_ranks
from integration_tests.models.architectures.kept import finite

SECONDS = 12.0
"""Most that a combination may take, beyond which it hangs."""
_MOST = 40
"""Combinations of a process group, at most."""
_JUDGED = ("first weight", "gradient", "clipped", "weight")
"""Beginnings of what must be compared of a job."""


def outcomes(family: str, found: Sequence[Case | Job]) -> Iterator[Outcome]:
    """Run combinations of a family, and yield what became of each."""
    prepare()
    with tempfile.TemporaryDirectory(prefix="hp-search-") as text:
        folder = Path(text)
        direct = [case for case in found if isinstance(case, Case)]
        for ranks in sorted({case.ranks for case in direct}):
            some = [case for case in direct if case.ranks == ranks]
            for number, begin in enumerate(range(0, len(some), _MOST)):
                batch = some[begin : begin + _MOST]
                yield from _together(family, batch, folder / f"{ranks}-{number}")
        judge = _Judge(family, folder)
        for number, job in enumerate(case for case in found if isinstance(case, Job)):
            yield judge(job, f"job-{number}")


def _together(family: str, batch: Sequence[Case], folder: Path) -> Iterator[Outcome]:
    """Run combinations in one process group, and what follows one that ends it in another."""
    tries = 0
    while batch:
        tries += 1
        place = folder / str(tries)
        work = partial(_rank, batch, place)
        limit = SECONDS + 3.0 * len(batch)
        died = run_ranks(work, size=batch[0].ranks, folder=place, seconds=limit)
        seen = [_lines(place / f"seen-{rank}.jsonl") for rank in range(batch[0].ranks)]
        done = max(1, min(map(len, seen)))
        for index, case in enumerate(batch[:done]):
            lines = [some[index] for some in seen if index < len(some)]
            yield _outcome(family, case, lines, died if len(lines) < case.ranks else "")
        batch = batch[done:]


def _lines(file: Path) -> list[dict[str, object]]:
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except FileNotFoundError:
        return []


def _outcome(family: str, case: Case, lines: Sequence[dict[str, object]], died: str) -> Outcome:
    """Return what all ranks of a combination have seen, as one."""
    reasons = [str(line["reason"]) for line in lines if "reason" in line]
    if reasons or died:
        died = died.replace("was killed by SIGALRM", f"hangs: not done after {SECONDS:.0f} s")
        told = next((r for r in reasons if "Connection" not in r), died or reasons[0])
        alone = died or len(reasons) < len(lines)
        reason = f"{told} (of {len(reasons)} of {case.ranks} ranks)" if alone and reasons else told
        return Outcome(family=family, name=case.name, state=REFUSED, reason=reason[:300])
    worst, where = 0.0, ""
    for line in lines:
        errors = line["errors"]
        assert isinstance(errors, dict)
        for name, error in errors.items():
            size = math.inf if error is None else float(error)
            if size > worst:
                worst, where = size, name
    state = EQUAL if worst <= case.limit else DIFFERENT
    where = where if state == DIFFERENT else ""
    return Outcome(family=family, name=case.name, state=state, error=finite(worst), where=where)


def _rank(batch: Sequence[Case], folder: Path) -> None:
    """Be a rank: work through combinations, and tell the others of each that it is done."""
    torch.set_num_threads(1)
    os.chdir(folder)  # for what a combination leaves there
    rank, size = dist.get_rank(), dist.get_world_size()
    store = FileStore(str(folder / "turns"), size)
    with (folder / f"seen-{rank}.jsonl").open("a") as file:
        for index, case in enumerate(batch):
            signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the rank where nobody waits for it
            torch.manual_seed(0)
            failed, began = "", time.monotonic()
            try:
                told: dict[str, object] = {
                    "errors": {name: finite(error) for name, error in case.work().items()}
                }
            except Exception as error:  # noqa: BLE001 - whatever a library refuses is told
                failed = f"{type(error).__name__}: {_first_line(error)}"
                told = {"reason": failed}
            file.write(json.dumps({**told, "seconds": time.monotonic() - began}) + "\n")
            file.flush()
            store.set(f"{index}-{rank}", "failed" if failed else "done")
            keys = [f"{index}-{other}" for other in range(size)]
            store.wait(keys, timedelta(seconds=SECONDS))
            if len({store.get(key) for key in keys}) > 1:
                os._exit(0)  # what the other rank has begun would meet what follows


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return lines[0].strip()


class _Judge:
    """Compares jobs with one process, which runs once for a group.

    Args:
        family: Family of the jobs.
        folder: Where runs write.
    """

    def __init__(self, family: str, folder: Path) -> None:
        self._family, self._folder = family, folder
        self._expected: dict[str, tuple[Recording, Floor]] = {}

    def __call__(self, job: Job, name: str) -> Outcome:
        """Run a job and compare it."""
        place = self._folder / job.group
        try:
            if job.group not in self._expected:
                self._expected[job.group] = with_floor(
                    lambda who, seed: recorded(place / who, job.reference, ranks=1, disturb=seed)
                )
            expected = self._expected[job.group]
            seen = recorded(
                place / name, job.train, ranks=job.ranks, meets=job.meets, start=job.start
            )
        except FailedError as error:
            return Outcome(family=self._family, name=job.name, state=REFUSED, reason=str(error))
        result = compare(seen, *expected)
        errors = [error for phase, error in result.largest.items() if phase in _JUDGED]
        made = partial(
            Outcome, family=self._family, name=job.name, error=finite(max(errors, default=0.0))
        )
        if result.first is not None:
            return made(state=DIFFERENT, where=str(result.first))
        missing = [why for what, why in result.unaligned.items() if what.startswith(_JUDGED)]
        if missing or not result.num_steps:
            return made(state=REFUSED, reason=missing[0] if missing else "no step was seen")
        return made(state=EQUAL)
