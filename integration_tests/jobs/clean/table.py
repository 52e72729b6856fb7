"""A page about clean jobs and seeded bugs, by style."""

from collections.abc import Sequence

from integration_tests.jobs.clean.job import DRAWN
from integration_tests.jobs.clean.runs import ACCUSED, EQUAL, FAILED, NOTHING, Found

_HEAD = """# Clean jobs, and bugs seeded in them

Written by `nox -s clean` (`integration_tests/jobs/clean`). Each job trains on two ranks what its
reference trains in one process, in another layout, order, padding or grouping: none may be called
different. Then each bug is seeded in it alone: it must be found, and its first difference must be
of the tensor and the kind that the bug changes.
"""


_COLUMNS: tuple[str, ...] = (
    "style",
    "jobs",
    "drawn",
    "accused",
    "not comparable",
    "with something listed",
)
_COLUMNS += ("bugs", "found", "named")


def summary(found: Sequence[Found]) -> str:
    """Say in lines what was found."""
    bugs = [bug for one in found for bug in one.bugs]
    states = [one.state for one in found]
    drawn = sum(one.origin == DRAWN for one in found)
    others = states.count(NOTHING), states.count(FAILED)
    return (
        f"{len(found)} clean jobs ({drawn} of them drawn) of {len({one.style for one in found})} "
        f"styles: {states.count(EQUAL)} equal, {states.count(ACCUSED)} accused, {others[0]} not "
        f"comparable, {others[1]} failed\n"
        f"{len(bugs)} seeded bugs: {sum(b.is_found for b in bugs)} found, "
        f"{sum(b.is_named for b in bugs)} named"
    )


def _why(one: Found) -> str:
    listed = (f"{name}: {why}" for name, why in one.unaligned.items())
    return one.first or one.reason or next(listed, "")


def table(found: Sequence[Found]) -> str:
    """Return the page."""
    lines = [_HEAD, "\n".join(f"- {line}" for line in summary(found).splitlines()), ""]
    lines += [
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for style in dict.fromkeys(one.style for one in found):
        some = [one for one in found if one.style == style]
        bugs = [bug for one in some for bug in one.bugs]
        cells = [
            style,
            len(some),
            sum(one.origin == DRAWN for one in some),
            sum(one.state == ACCUSED for one in some),
            sum(one.state in (NOTHING, FAILED) for one in some),
            sum(one.num_unaligned > 0 for one in some),
            len(bugs),
            sum(bug.is_found for bug in bugs),
            sum(bug.is_named for bug in bugs),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## Accused, not comparable, or failed", ""]
    odd = [one for one in found if one.state != EQUAL]
    lines += [f"- `{one.name}`: {one.state}: {_why(one)}" for one in odd] or ["None."]
    lines += ["", "## Bugs that were not found, or named as something else", ""]
    missed = [(one, bug) for one in found for bug in one.bugs if not bug.is_named]
    lines += [
        f"- `{one.name}`, {bug.name}: {bug.first or bug.reason or 'not found'}"
        for one, bug in missed
    ] or ["None."]
    return "\n".join(lines) + "\n"
