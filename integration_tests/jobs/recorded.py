"""Jobs that are functions of this process's, recorded as `hp-verify -- JOB` records programs."""

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from hp_platform.testing import run_distributed
from hp_verify.comparing.compare import compare, with_floor
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, join
from hp_verify.recording.begin import begin
from hp_verify.recording.request import Request


def _work(request: Request, train: Callable[[], object]) -> None:
    with closing(begin(request)):
        train()


def record(request: Request, train: Callable[[], object], *, ranks: int) -> Recording:
    """Run a job, or one more launch of it, and put together what all have recorded.

    Args:
        request: What is asked of it.
        train: What a rank does; it is pickled.
        ranks: Number of ranks.
    """
    Path(request.folder).mkdir(exist_ok=True)
    run_distributed(functools.partial(_work, request, train), world_size=ranks)
    return join(Path(request.folder))


def beside_one(
    folder: Path, train: Callable[[str], object], fault: str = "", *, steps: int
) -> Comparison:
    """Compare a job on two ranks with the same in one process.

    Args:
        folder: An empty folder.
        train: What a rank does, given a fault; it is pickled.
        fault: Fault of the two ranks.
        steps: Most updates that are compared.
    """
    theirs = str(folder / "reference")

    def referred(name: str, seed: int) -> Recording:
        known = theirs if seed else ""
        asked = Request(str(folder / name), reference=known, steps=steps, disturb=seed)
        return record(asked, functools.partial(train, ""), ranks=1)

    reference, floor = with_floor(referred)
    request = Request(str(folder / "job"), reference=theirs, steps=steps)
    return compare(record(request, functools.partial(train, fault), ranks=2), reference, floor)
