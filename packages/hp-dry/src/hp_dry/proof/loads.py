"""Kernels that are loaded while a message may be waiting on the device: `late_loads`. No torch.

The first launch of a kernel loads its module. That waits for everything that the device has been
given, and other threads of the process launch nothing meanwhile. A receive on the device waits for
its sender; if that one waits in turn for what a thread of this rank has still to send, both wait
for ever (meta-pytorch/torchcomms #2334, vllm #53577). Whether it comes to that is a race of
threads, so that no order that was recorded proves anything: there must be no message that another
thread has launched, and that the host does not know to be done, when a kernel is loaded.

Triton's kernels, and what inductor writes, are loaded when they are launched first, whatever is
set; those of torch and its libraries too, unless `CUDA_MODULE_LOADING` is EAGER. One thread that
launches everything is another matter: `prove` has the host wait in its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from hp_dry.proof.clocks import Clocks, Epoch
from hp_dry.proof.matching import Problem, told
from hp_dry.trace import Collective, Event, Launch, Trace


class Modules:
    """Keeps what a device has loaded, while a trace is gone through.

    Args:
        eager: Whether `CUDA_MODULE_LOADING` is EAGER.
    """

    def __init__(self, *, eager: bool) -> None:
        self._eager, self._loaded = eager, set[str]()

    def loads(self, event: Launch) -> str:
        """Take a launch; return the module that it loads, or ""."""
        module = event.variant or ("" if self._eager else event.what)
        if module in self._loaded:
            return ""
        self._loaded.add(module)
        return module


def late_loads(trace: Trace | Iterable[Event], *, rank: int = -1, eager: bool) -> list[Problem]:
    """Look for kernels that one thread loads while messages of another may be under way.

    Args:
        trace: What a rank did whose threads launch as they please.
        rank: Global rank; of a `Trace` it is known.
        eager: Whether `CUDA_MODULE_LOADING` is EAGER, so that torch's own kernels are loaded
            before anything is launched.

    Returns:
        The first kernel of every line that loads one too late.
    """
    rank = trace.rank if isinstance(trace, Trace) else rank
    clocks, modules = Clocks(), Modules(eager=eager)
    waiting: list[tuple[Epoch, Collective]] = []
    found: dict[str, Problem] = {}
    for event in trace:
        clocks.observe(event)
        if isinstance(event, Collective) and event.peer >= 0:
            waiting.append((clocks.now(event.stream), event))
        if not isinstance(event, Launch) or not (module := modules.loads(event)):
            continue
        waiting = [each for each in waiting if not clocks.is_known_to_host(each[0])]
        others = (message for _, message in waiting if message.thread != event.thread)
        if (message := next(others, None)) is not None:
            found.setdefault(event.at, _problem(rank, event, module, message))
    return list(found.values())


def _problem(rank: int, event: Launch, module: str, message: Collective) -> Problem:
    place = f" ({event.place})" if event.place else ""
    text = (
        f"rank {rank} may wait for ever: {module} is launched first, and so loaded, at {event.at}"
        f"{place}, which waits for {told(message)} in {message.group}, of another thread, and lets "
        "that one send nothing meanwhile; launch it before the first message (hp-vtp: by_host)"
    )
    return Problem("module load", (rank, message.peer), (event.at, message.at), text)
