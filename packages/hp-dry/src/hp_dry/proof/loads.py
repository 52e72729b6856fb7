"""Kernels that are loaded while a message may be waiting on the device: `late_loads`. No torch.

The first launch of a kernel loads its module. The load waits for all work of the device, and other
threads of the process launch nothing meanwhile. A receive on the device waits for its sender; if
the sender waits in turn for a message that a thread of this rank has yet to send, both wait for
ever (meta-pytorch/torchcomms #2334, vllm #53577). It depends on a race of threads, so that a
recorded order proves nothing. When a kernel is loaded, there must be no message of another thread
that the host does not know to be done.

Kernels of Triton and inductor are always loaded at their first launch; kernels of torch and its
libraries too, unless `CUDA_MODULE_LOADING` is EAGER. For a single thread that launches everything,
`prove` includes the waits of the host instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from hp_dry.proof.clocks import Clocks, Epoch
from hp_dry.proof.matching import Problem, described
from hp_dry.trace import Collective, Event, Launch, Trace


class Modules:
    """Modules that a device has loaded so far in a trace.

    Args:
        eager: Whether `CUDA_MODULE_LOADING` is EAGER.
    """

    def __init__(self, *, eager: bool) -> None:
        self._eager, self._loaded = eager, set[str]()

    def loads(self, event: Launch) -> str:
        """Process a launch; return the module that it loads, or ""."""
        module = event.variant or ("" if self._eager else event.what)
        if module in self._loaded:
            return ""
        self._loaded.add(module)
        return module


def late_loads(trace: Trace | Iterable[Event], *, rank: int = -1, eager: bool) -> list[Problem]:
    """Find kernels that one thread loads while messages of another thread may be pending.

    Args:
        trace: Events of a rank whose threads launch in any order.
        rank: Global rank, which a `Trace` knows itself.
        eager: Whether `CUDA_MODULE_LOADING` is EAGER, so that torch's own kernels are loaded
            before anything is launched.

    Returns:
        Problem for the first such kernel of every line.
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
        f"{place}, which waits for {described(message)} in {message.group}, of another thread, and "
        "lets that one send nothing meanwhile; launch it before the first message (hp-vtp: by_host)"
    )
    return Problem("module load", (rank, message.peer), (event.at, message.at), text)
