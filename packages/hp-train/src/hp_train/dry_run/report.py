"""What a dry run found, as text. No torch."""

from collections.abc import Iterator

from hp_train.dry_run.summary import Summary
from hp_train.dry_run.tables import Table, size, tables

_WIDEST = 60


def report(summary: Summary) -> list[str]:
    """Lines to print: a head, problems, tables."""
    lines = [*_head(summary)]
    for table in tables(summary):
        lines += ["", *_printed(table)]
    return lines


def verdict(summary: Summary) -> str:
    """Whether it fits, in a sentence."""
    if not summary.ranks:
        return "no rank was run"
    worst = summary.worst
    share = summary.share(worst)
    needs = f"rank {worst.rank} needs {size(share * summary.gpu_bytes)}"
    fits = "fits" if share <= 1 else "does not fit"
    return f"{fits}: {needs}, {share:.0%} of {size(summary.gpu_bytes)}"


def problems(summary: Summary) -> list[str]:
    """What would go wrong: between ranks, and what devices would refuse."""
    found = list(summary.problems)
    for each in summary.ranks:
        found += [f"rank {each.rank}: {fault}" for fault in each.faults]
    return list(dict.fromkeys(found))


def _head(summary: Summary) -> Iterator[str]:
    num_classes = len({each.rank for each in summary.ranks})
    layout = f", {summary.layout}" if summary.layout else ""
    yield f"{summary.name}{layout}: {summary.world_size} ranks in {num_classes} classes"
    yield f"{summary.gpu}: {verdict(summary)}"
    found = problems(summary)
    yield f"{len(found)} problems" if found else "no problems between ranks or on a device"
    yield from (f"  {each}" for each in found)


def _printed(table: Table) -> Iterator[str]:
    rows = [tuple(_cut(word) for word in row) for row in table.rows]
    columns = zip(table.columns, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
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
    """Keep the end of a long path, the beginning of other long words."""
    if len(word) <= _WIDEST:
        return word
    return f"...{word[3 - _WIDEST :]}" if "/" in word else f"{word[: _WIDEST - 3]}..."
