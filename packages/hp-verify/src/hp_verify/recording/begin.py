"""Begin the recording of a process."""

from collections.abc import Iterator
from contextlib import contextmanager

from hp_platform.device.float64 import lift
from hp_verify.recording import randomness
from hp_verify.recording.disturbing import disturb
from hp_verify.recording.recorder import Recorder
from hp_verify.recording.request import Request
from hp_verify.recording.second_run import Keeper


@contextmanager
def recording(request: Request) -> Iterator[None]:
    """Record what this process computes inside; nothing else must be recorded in it.

    Args:
        request: What is asked of it.
    """
    recorder = begin(request)
    yield
    recorder.close()


def begin(request: Request) -> Recorder:
    """Record this process from now on; the recording is written at the end of the process.

    Args:
        request: What is asked of it.
    """
    randomness.seed(request.seed)
    if request.float64:
        lift()
    if request.disturb:
        disturb(request.disturb)
    recorder = Recorder(request) if request.focus is None else Keeper(request)
    recorder.listen()
    return recorder
