"""Calls of modules that the job makes and the reference does not: which of its calls are which."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from hp_verify.comparing.recordings import Digests, Step
from hp_verify.recording import events as ev

Apart = Callable[[Digests, Digests], float]
"""Relative distance of a tensor from the reference's; NaN: they cannot be compared."""


def matched(mine: Step, theirs: Step, apart: Apart) -> dict[str, int]:
    """Call the job's outputs as the reference does, where the job calls a module more often.

    Of calls of a module in one of the model the first is named as the module, others as ``#1`` and
    so on: one more shifts those after it.

    Args:
        mine: A step of the job, whose names are changed.
        theirs: The same of the reference.
        apart: Distance of two tensors.

    Returns:
        Output of a module -> how often more often than in the reference it was computed.
    """
    more: dict[str, int] = {}
    for phase, others in ((ev.FORWARD, (ev.FORWARD, ev.BACKWARD)), (ev.EVALUATION, ())):
        ours, expected = mine.tensors.get(phase, {}), theirs.tensors.get(phase, {})
        ours_by_base, by_base = _by_base(ours), _by_base(expected)
        for base, names in by_base.items():
            calls = ours_by_base.get(base, [])
            if len(calls) <= len(names):
                continue
            more[base] = len(calls) - len(names)
            chosen = _chosen(calls, names, lambda a, b: apart(ours[a], expected[b]))  # noqa: B023
            if [*chosen] != calls[: len(names)]:
                rest = [name for name in calls if name not in chosen]
                renamed = dict(zip([*chosen, *rest], calls, strict=True))
                for kind in others or (phase,):
                    _rename(mine.tensors.get(kind, {}), renamed)
    return more


def _by_base(names: Mapping[str, Digests]) -> dict[str, list[str]]:
    """Group names of calls by the output of a module, the first call first."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("#")[0]].append(name)
    return {
        base: sorted(calls, key=lambda name: int(name.partition("#")[2] or 0))
        for base, calls in found.items()
    }


def _chosen(calls: list[str], names: list[str], apart: Callable[[str, str], float]) -> list[str]:
    """Return the job's calls that match the reference's, in order; else the first ones."""
    first, found = 0, []
    for index, name in enumerate(names):
        most = len(calls) - len(names) + index + 1
        near = [at for at in range(first, most) if apart(calls[at], name) <= ev.TERMS]
        if not near:
            return calls[: len(names)]
        found.append(calls[near[0]])
        first = near[0] + 1
    return found


def _rename(tensors: dict[str, Digests], renamed: Mapping[str, str]) -> None:
    taken = {name: tensors.pop(name) for name in renamed if name in tensors}
    tensors.update({renamed[name]: tensor for name, tensor in taken.items()})
