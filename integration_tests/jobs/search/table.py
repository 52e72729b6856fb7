"""What was found, as a page of Markdown. No torch."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from integration_tests.jobs.search.cases import DIFFERENT, EQUAL, REFUSED, Outcome
from integration_tests.jobs.search.causes import Cause, cause_of
from integration_tests.models.architectures.kept import told

Found = Mapping[str, tuple[Mapping[str, str], Sequence[Outcome]]]
"""Family -> versions of its packages, outcomes of its combinations."""
_SHOWN = 12
"""Names of combinations of a cause, at most."""
_STATES = (EQUAL, REFUSED, DIFFERENT)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e-?\d+)?")


def table(found: Found) -> str:
    """Write the page."""
    versions = {name: each for some, _ in found.values() for name, each in some.items()}
    facts = ", ".join(f"{name} {each}" for name, each in sorted(versions.items()))
    lines = [
        "# Combinations of features beside one process",
        "",
        "<!-- written by `nox -s search -- --table docs/found/table.md`; not by hand -->",
        "",
        f"{facts}; Gloo on a CPU, 2 or 4 ranks. [What this is](README.md).",
        "",
        "| family | combinations | equal | not comparable | different |",
        "|---|---|---|---|---|",
        *_counts(found),
        "",
        *_differences(found),
        *_families(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _counts(found: Found) -> Iterator[str]:
    every: Counter[str] = Counter()
    for family, (_, outcomes) in found.items():
        states = Counter(one.state for one in outcomes)
        every += states
        yield _row(f"[{family}](#{family.replace('_', '-')})", states)
    yield _row("together", every)


def _row(name: str, states: Counter[str]) -> str:
    cells = [str(states.total()), *(str(states[state]) for state in _STATES)]
    return f"| {name} | {' | '.join(cells)} |"


def _differences(found: Found) -> Iterator[str]:
    """Tell what is different, by its cause."""
    by_cause: dict[Cause | None, list[Outcome]] = defaultdict(list)
    for family, (_, outcomes) in found.items():
        for one in outcomes:
            if one.state == DIFFERENT:
                by_cause[cause_of(family, one.name)].append(one)
    if by_cause:
        yield from ("## What is different", "")
    for cause, some in sorted(by_cause.items(), key=lambda item: _order(item[0])):
        if cause is None:
            yield "- **Not looked into:** " + _names(some)
            continue
        name = f"[{cause.what}]({cause.report})" if cause.report else cause.what
        known = f", known: {cause.known}" if cause.known else ""
        yield f"- **{name}**{known}: {_names(some)}"
    yield ""


def _order(cause: Cause | None) -> tuple[bool, bool, str]:
    return (cause is None, bool(cause and cause.known), cause.what if cause else "")


def _names(some: Sequence[Outcome]) -> str:
    """Tell some combinations by name, and how many there are."""
    shown = "; ".join(f"{one.family}: {one.name} ({told(one.error)})" for one in some[:_SHOWN])
    return shown + (f"; and {len(some) - _SHOWN} more" if len(some) > _SHOWN else "")


def _families(found: Found) -> Iterator[str]:
    """Tell of each family what was tried, in a line for each first word, and what was refused."""
    for family, (_, outcomes) in found.items():
        yield from (f"## {family.replace('_', '-')}", "")
        yield "| tried | combinations | equal | not comparable | different |"
        yield "|---|---|---|---|---|"
        by_word: dict[str, Counter[str]] = defaultdict(Counter)
        for one in outcomes:
            by_word[one.name.partition(" ")[0]][one.state] += 1
        yield from (_row(word, states) for word, states in by_word.items())
        yield ""
        reasons = Counter(_reason(one) for one in outcomes if one.state == REFUSED)
        if reasons:
            yield from ("Not comparable, as the library says:", "")
            yield from (f"- {count} x {reason}" for reason, count in reasons.most_common())
            yield ""


def _reason(one: Outcome) -> str:
    plain = one.reason.replace("`", "").replace("|", "/")
    return f"`{_NUMBER.sub('N', plain)[:140].strip()}`"
