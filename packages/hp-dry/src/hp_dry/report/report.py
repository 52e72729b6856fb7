"""Report of a dry run as text. No torch."""

from collections.abc import Iterator

from hp_base.messages import size
from hp_dry.report.summary import Summary
from hp_dry.report.tables import Table, tables

_WIDEST = 60


def report(summary: Summary) -> list[str]:
    """Return the lines to print: a head, problems, tables."""
    lines = [*_head(summary)]
    for table in tables(summary):
        lines += ["", *_printed(table)]
    return lines


def verdict(summary: Summary) -> str:
    """State in a sentence whether the run fits in memory."""
    if not summary.ranks:
        return "no rank was run"
    worst = summary.worst
    if failed := [each for each in summary.ranks if each.memory.out_of_memory]:
        return f"does not fit: rank {failed[0].rank}: {failed[0].memory.out_of_memory}"
    share = summary.share(worst)
    needs = f"rank {worst.rank} needs {size(share * summary.gpu_bytes)}"
    fits = "fits" if summary.fits else "does not fit"
    return f"{fits}: {needs}, {share:.0%} of {size(summary.gpu_bytes)}"


def about(summary: Summary) -> str:
    """Describe the run in a line."""
    classes = count(len({each.rank for each in summary.ranks}), "class", "classes")
    layout = f", {summary.layout}" if summary.layout else ""
    took = f", in {summary.seconds:.0f} s" if summary.seconds else ""
    return f"{count(summary.world_size, 'rank', 'ranks')} in {classes}{layout}{took}"


def found_problems(summary: Summary) -> str:
    """State the number of problems."""
    if not summary.problems:
        return "no problems between ranks or on a device"
    return count(len(summary.problems), "problem", "problems")


def count(number: int, one: str, several: str) -> str:
    """Return a number with the singular or the plural of a noun."""
    return f"{number:,} {one if number == 1 else several}"


def _head(summary: Summary) -> Iterator[str]:
    yield f"{summary.name}: {about(summary)}"
    yield f"{summary.gpu}: {verdict(summary)}"
    yield found_problems(summary)
    yield from (f"  {each}" for each in summary.problems)


def _printed(table: Table) -> Iterator[str]:
    rows = [tuple(_cut(word) for word in row) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]
    yield table.title
    for row in (table.columns, *rows):
        words = (
            word.ljust(width) if index in table.words else word.rjust(width)
            for index, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join(words).rstrip()
    if table.note:
        yield f"  ({table.note})"


def _cut(word: str) -> str:
    """Shorten a long word: a path to its end, another word to its beginning."""
    if len(word) <= _WIDEST:
        return word
    return f"...{word[3 - _WIDEST :]}" if "/" in word else f"{word[: _WIDEST - 3]}..."
