"""The command's request to the programs of a job, through one environment variable."""

import os
from pathlib import Path

import msgspec

from hp_verify.recording import opened
from hp_verify.recording.events import Steps, steps_in

VARIABLE = "HP_VERIFY_JOB"
RUN = "HP_VERIFY_RUN"
"""Another word for each run of a job or its reference, for what must not be there twice."""
WITHIN = "HP_VERIFY_WITHIN"
"""Process id of what is recorded, for programs that it starts: they are no ranks of the job."""
SITE = Path(__file__).parent / "site"


class Focus(msgspec.Struct, frozen=True):
    """Around what a second run keeps tensors themselves.

    Attributes:
        step: Counted from 1.
        phase: One of `hp_verify.recording.events.PHASES`.
        name: The module's output or the parameter that differs, as the reference calls it.
        modules: Modules of which all that goes in and comes out is kept.
        parameters: Parameters whose gradients, values and state are kept.
    """

    step: int
    phase: str
    name: str
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to the processes of a job.

    Attributes:
        folder: Folder that the job's processes write into.
        reference: Folder that the reference has written; empty: this is the reference.
        seed: Seed of random numbers at the start of a program; its own come later and count.
        steps: Most updates of the weights that are recorded; 0: see `Steps`.
        float64: Whether parameters and casts are lifted to float64.
        disturb: Whether sums of products are taken in another order, to learn what rounding does.
        start: Whether the reference's first weights take the place of this job's.
        outputs: Whether outputs of modules, and their gradients, are recorded.
        rules: File of rules that say where parameters lie; empty: none.
        focus: Around what tensors themselves are kept, in place of digests of all.
        opened: Whether files that a program opens are noted down.
    """

    folder: str
    reference: str = ""
    seed: int = 0
    steps: int = 0
    float64: bool = False
    disturb: int = 0
    start: bool = False
    outputs: bool = True
    rules: str = ""
    focus: Focus | None = None
    opened: bool = False

    def wanted(self) -> Steps:
        """Return the steps that a process writes down; of a second run those around its focus."""
        if self.focus is not None:
            return Steps(self.steps, {self.focus.step - 1, self.focus.step})
        known = steps_in(Path(self.reference)) if self.reference and not self.steps else set()
        return Steps(self.steps, known | {max(known) + 1} if known else ())


def environment(request: Request) -> dict[str, str]:
    """Return the environment of a job that is to be recorded."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        **os.environ,
        RUN: Path(request.folder).name,
        VARIABLE: msgspec.json.encode(request).decode(),
        "PYTHONPATH": os.pathsep.join(paths),
        **({opened.VARIABLE: request.folder} if request.opened else {}),
    }


def requested() -> Request:
    """Return what was asked of this process."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Request)
