"""Report of a dry run as tables of words, for text and pages. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from hp_base.messages import size
from hp_dry.report.sites import line
from hp_dry.report.summary import RankSummary, Summary
from hp_dry.report.traffic import Communicator, Count
from hp_dry.report.work import Cost, rates_of

_MOST_ROWS = 40
_MOST_RANKS = 4
_COSTS = ("launches", "moved", "products", "host waits")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words.

    Attributes:
        title: Heading of the table.
        columns: Names of the columns.
        rows: Rows, each of as many words as there are columns.
        words: Indices of the columns of words, which are aligned left, unlike numbers.
        note: Explanation below the table; empty: none.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: frozenset[int] = field(default=frozenset({0}))
    note: str = ""


def tables(summary: Summary) -> list[Table]:
    """Return all tables of a dry run that have rows."""
    if not summary.ranks:
        return []
    worst = summary.worst
    found = [
        classes(summary),
        paces(summary),
        skews(summary),
        kinds(summary, worst),
        largest(worst),
        phases(worst),
        layers(worst),
        microbatches(worst),
        waits(worst),
        communicators(worst),
        saves(summary),
    ]
    return [table for table in found if table.rows]


def classes(summary: Summary) -> Table:
    """Return a line for each class of ranks."""
    several = len(summary.skews) > 1
    rows = [
        (
            str(each.rank),
            several_ranks(each.stands_for),
            *([each.skew] if several else []),
            size(each.memory.peak_live),
            reserved(each),
            f"{summary.share(each):.0%}",
            f"{each.work.total.launches:,}",
            size(each.work.total.bytes),
            f"{each.work.total.host_waits:,}",
            f"{sum(c.total.count for c in each.traffic.communicators):,}",
            size(sum(c.total.bytes for c in each.traffic.communicators if not c.on_host)),
        )
        for each in sorted(summary.ranks, key=lambda each: -each.memory.needed)
    ]
    columns = (
        "rank",
        "stands for",
        *(["skew"] if several else []),
        "live",
        "reserved",
        "of device",
        "launches",
        "moved",
        "host waits",
        "operations",
        "exchanged",
    )
    steps = {each.work.step for each in summary.ranks}
    note = f"launches, bytes moved and waits of the host are those of step {max(steps)}; " * (
        max(steps) >= 0
    )
    note += "operations between ranks are those of the whole run"
    return Table(
        "Classes of ranks", columns, rows, frozenset({0, 1, 2} if several else {0, 1}), note
    )


def paces(summary: Summary) -> Table:
    """Compare the paces of host and device in a step, for each class of ranks."""
    machine = rates_of(summary.gpu)
    rows: list[tuple[str, ...]] = []
    note = ""
    if machine is not None:
        for each in summary.ranks:
            host, device = pace = each.work.pace(machine)
            share = part(host, device)
            who = "host" if pace.host_binds else "device"
            if host:
                rows.append((str(each.rank), f"{host:.3f} s", f"{device:.3f} s", share, who))
        note = (
            f"{1e6 * machine.launch_seconds:g} us for a launch; the device by its products and "
            "bytes at the rates of hp plan, at least; neither exchanges nor waits are counted"
        )
    columns = ("rank", "host launches", "device computes", "host of device", "bound by")
    return Table("Host and device in a step", columns, rows, frozenset({0, 4}), note)


def skews(summary: Summary) -> Table:
    """Return the memory of the neediest rank under each model of the routing, if several."""
    worst = summary.skews
    least = min((each.memory.needed for each in worst.values()), default=0)
    rows = [
        (
            name,
            str(each.rank),
            size(each.memory.peak_live),
            reserved(each),
            f"{summary.share(each):.0%}",
            f"+{size(each.memory.needed - least)}" if each.memory.needed > least else "least",
            f"{each.work.total.launches:,}",
        )
        for name, each in worst.items()
    ]
    return Table(
        "Routing",
        ("skew", "rank", "live", "reserved", "of device", "beside the least", "launches"),
        rows if len(rows) > 1 else [],
    )


def kinds(summary: Summary, rank: RankSummary) -> Table:
    """Return the memory at the peak by kind, and memory besides tensors."""
    memory = rank.memory
    rows = [
        *(
            (
                kind,
                size(memory.at_peak.get(kind, 0)),
                part(memory.at_peak.get(kind, 0), memory.peak_live),
                size(most),
            )
            for kind, most in memory.peak_by_kind.items()
        ),
        ("all tensors", size(memory.peak_live), "100%", ""),
    ]
    if memory.peak_reserved is not None:
        lost = f"{memory.fragmentation:.0%} of it in no tensor"
        if memory.retries:
            lost += f", given back {memory.retries} times"
        rows.append(("reserved", size(memory.peak_reserved), "", lost))
    if memory.least is not None:
        over = memory.least / max(memory.peak_live, 1) - 1
        rows.append(
            ("needed, where memory is short", size(memory.least), "", f"{over:.1%} beside tensors")
        )
    counts = {"communicators": summary.communicators, "peer buffers": summary.peers}
    rows += [
        *(
            (name, size(number), "", str(counts.get(name, "")))
            for name, number in summary.beside.items()
        ),
        (
            "in all, of the device",
            size(summary.gpu_bytes * summary.share(rank)),
            "",
            f"{summary.share(rank):.1%} of {size(summary.gpu_bytes)}",
        ),
    ]
    return Table(
        f"Memory of rank {rank.rank}",
        ("memory", "at the peak", "share", "most at any time"),
        rows,
        frozenset({0}),
        when(rank),
    )


def largest(rank: RankSummary) -> Table:
    """Return the largest blocks that are alive at the peak."""
    rows = [
        (
            size(each.bytes),
            each.kind,
            f"{list(each.shape)} {each.dtype}".strip() if each.shape else each.dtype,
            line(each.at),
            each.what,
        )
        for each in rank.memory.largest
    ]
    return Table(
        "Largest tensors at the peak",
        ("bytes", "kind", "shape", "made at", "by"),
        rows,
        frozenset({1, 2, 3, 4}),
    )


def phases(rank: RankSummary) -> Table:
    """Return the costs of the parts of a step, and of the time before the first step."""
    work = rank.work
    rows = [(phase, *cost(each)) for phase, each in work.by_phase().items()]
    rows.append(("the step", *cost(work.total)))
    if work.step >= 0:
        rows.append(("before the first step", *cost(work.before)))
    title = f"Work in step {work.step}" if work.step >= 0 else "Work"
    return Table(title, ("part", *_COSTS), rows)


def layers(rank: RankSummary) -> Table:
    """Return the costs of layers in all microbatches; equal neighbours share a row."""
    by_layer = rank.work.by_layer()
    outside = by_layer.pop("", None)
    return _costs("Work by layer, all microbatches", "layer", by_layer, outside)


def microbatches(rank: RankSummary) -> Table:
    """Return the costs of microbatches in all layers; equal neighbours share a row."""
    by_microbatch = rank.work.by_microbatch()
    outside = by_microbatch.pop(-1, None)
    named = {f"microbatch {index}": each for index, each in by_microbatch.items()}
    return _costs("Work by microbatch, all layers", "microbatch", named, outside)


def _costs(title: str, part: str, costs: Mapping[str, Cost], outside: Cost | None) -> Table:
    """Return a row for each run of equal costs, and a row for costs outside all parts."""
    alike = groupby(costs, key=costs.__getitem__)
    rows = [(_several([*equal]), *cost(each)) for each, equal in alike]
    if rows and outside is not None:
        rows.append((f"outside of {part}s", *cost(outside)))
    return Table(title, (part, *_COSTS), rows[:_MOST_ROWS])


def waits(rank: RankSummary) -> Table:
    """Return the lines at which the host waits for the device."""
    rows = [
        (
            line(each.at),
            each.what,
            f"{each.count:,}",
            size(each.bytes),
            f"{each.layers:,}",
            f"{each.microbatches:,}",
        )
        for each in rank.work.waits[:_MOST_ROWS]
    ]
    return Table(
        "The host waits for the device",
        ("line", "by", "times", "copied", "layers", "microbatches"),
        rows,
        frozenset({0, 1}),
    )


def communicators(rank: RankSummary) -> Table:
    """Return the exchanges over each communicator."""
    rows = [
        (
            each.name,
            several_ranks(each.ranks),
            operation,
            f"{count.count:,}",
            size(count.bytes),
            ", ".join(each.first) if index == 0 else "",
        )
        for each in rank.traffic.communicators
        for index, (operation, count) in enumerate(_without_start(each).items())
    ]
    note = "bytes of the larger of what the rank gives and gets; the JSON lists all of it in order"
    return Table(
        "Between ranks",
        ("communicator", "ranks", "operation", "times", "bytes", "first of it"),
        rows,
        frozenset({0, 1, 2, 5}),
        note,
    )


def _without_start(each: Communicator) -> dict[str, Count]:
    """Return the operations without the connection of the ranks, unless that is the only one."""
    others = {op: count for op, count in each.operations.items() if op != "connect"}
    return others or each.operations


def saves(summary: Summary) -> Table:
    """Return the part of each rank in a checkpoint."""
    found = {each.rank: (each.num_parameters, each.saved) for each in summary.ranks}
    rows = [
        (
            str(rank),
            f"{number:,}" if number >= 0 else "",
            saved.file,
            f"{saved.num_tensors:,}",
            size(saved.num_bytes),
            size(saved.own_bytes),
        )
        for rank, (number, saved) in sorted(found.items())
        if saved is not None
    ]
    return Table(
        "A checkpoint",
        ("rank", "parameters", "file", "tensors", "held", "written, about"),
        rows[:_MOST_ROWS],
        frozenset({0, 2}),
    )


def when(rank: RankSummary) -> str:
    """Describe the moment of the peak."""
    peak = rank.memory.peak
    if peak is None:
        return "nothing was allocated"
    place = f"in {peak.place}, " if peak.place else ""
    return f"the peak is reached {place}after {peak.launches:,} launches, at {line(peak.at)}"


def cost(each: Cost) -> tuple[str, str, str, str]:
    """Return the words for a cost."""
    return f"{each.launches:,}", size(each.bytes), flops(each.flops), f"{each.host_waits:,}"


def reserved(rank: RankSummary) -> str:
    """Return the words for reserved bytes."""
    found = rank.memory.peak_reserved
    return "not known" if found is None else size(found)


def part(number: float, whole: float) -> str:
    """Return a share of a whole."""
    return f"{number / whole:.0%}" if whole else ""


def flops(number: int) -> str:
    """Return multiplications and additions in decimal units."""
    for unit, power in (("P", 15), ("T", 12), ("G", 9), ("M", 6)):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}FLOP"
    return f"{number:,} FLOP" if number else "0"


def several_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words.

    >>> several_ranks([3]), several_ranks(range(8)), several_ranks([0, 8, 16]), several_ranks([])
    ('1: 3', '8: 0 to 7', '3: 0, 8, 16', '')
    """
    if not ranks:
        return ""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{len(ranks)}: {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"{len(ranks)}: {shown}{', ...' * (len(ranks) > _MOST_RANKS)}"


def _several(names: list[str]) -> str:
    """Join names that end in numbers, as words."""
    numbers = [int(name.rpartition(" ")[2].rpartition(".")[2]) for name in names]
    if len(names) == 1:
        return names[0]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{names[0]} to {numbers[-1]}, each"
    steps = {after - before for before, after in pairwise(numbers)}
    if len(steps) == 1 and len(names) > 2:
        return f"{names[0]}, {numbers[1]} to {numbers[-1]}, each"
    return f"{', '.join((names[0], *map(str, numbers[1:])))}, each"
