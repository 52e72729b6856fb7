"""Parts of `Event.place` and `Event.at`. No torch."""

import re
from functools import lru_cache
from typing import NamedTuple

_STEP = re.compile(r"(?:^|, )step (\d+)(?:, |$)")
_STAGE = re.compile(r"(?:^|, )stage (\d+)")
_MICROBATCH = re.compile(r"(?:^|, )microbatch (\d+)")
_SCHEDULE_STEP = re.compile(r"in step (\([^()]*\)\w+|\w+)")
_LAYER = re.compile(r"(?:^|[ ,.])((?:layers|mtp)[. ](\d+))")
_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_KIND = re.compile(r"\d+([A-Z_]+)")


class Site(NamedTuple):
    """Parts of a place.

    Attributes:
        step: Step of the optimizer, counted from 1; -1 outside of steps.
        phase: `"forward"`, `"backward"`, another part of a step such as `"optimizer"`, or a part of
            the run outside of steps such as `"build"`.
        stage: Index of the pipeline stage; -1 without a stage.
        microbatch: Index of the microbatch; -1 without a microbatch.
        schedule_step: Action of the pipeline schedule, such as `"1F3"`.
        layer: Name of the layer, such as `"layers.3"`.
        module: Innermost words of the place, such as `"layers.3, experts"`.
    """

    step: int = -1
    phase: str = ""
    stage: int = -1
    microbatch: int = -1
    schedule_step: str = ""
    layer: str = ""
    module: str = ""


@lru_cache(maxsize=65_536)
def site(place: str) -> Site:
    """Split `Event.place` into its parts."""
    step = _STEP.search(place)
    layer = _LAYER.search(place)
    inside = _SCHEDULE_STEP.search(place)
    schedule_step = inside[1] if inside else ""
    rest = place[inside.end() :] if inside else place[step.end() :] if step else place
    words = [word for word in rest.split(", ") if word]
    return Site(
        step=int(step[1]) if step else -1,
        phase=_phase(schedule_step, words, in_step=step is not None),
        stage=_number(_STAGE, place),
        microbatch=_number(_MICROBATCH, place),
        schedule_step=schedule_step,
        layer=layer[1].replace(" ", ".") if layer else "",
        module=", ".join(words),
    )


def line(at: str) -> str:
    """Return the innermost line of `Event.at`, without its callers."""
    return at.partition(" < ")[0]


def _number(pattern: re.Pattern[str], place: str) -> int:
    found = pattern.search(place)
    return int(found[1]) if found else -1


def _phase(schedule_step: str, words: list[str], *, in_step: bool) -> str:
    if schedule_step.startswith("("):
        return "overlapped"
    if schedule_step:
        kind = _KIND.match(schedule_step)
        return _PHASES.get(kind[1], kind[1].lower()) if kind else "pipeline"
    if "backward" in words:
        return "backward"
    if words:
        return words[0]
    return "between" if in_step else "outside"
