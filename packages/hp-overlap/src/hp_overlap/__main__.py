"""Print how much of the communication in a trace of torch's profiler is hidden behind compute.

The trace is what `torch.profiler.profile(...).export_chrome_trace` wrote, compressed or not. For
every process, or GPU, the time of its transfers is printed, the share of it in which compute ran,
and the transfers that are exposed the longest.
"""

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from hp_overlap.report import EXCHANGES, OverlapReport, overlap_report

_MOST_BYTES = 1 << 32
"""Largest size of a trace, unpacked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports of a trace.

    Returns:
        0; 1 if it has no transfers, 2 if it is no trace or an argument is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m hp_overlap", description=__doc__)
    parser.add_argument("trace", type=Path, help="file of Chrome's format, or that in .gz")
    parser.add_argument("--match", default=EXCHANGES, help=f"transfers to count: {EXCHANGES}")
    parser.add_argument("--worst", type=int, default=5, help="exposed transfers to list")
    given = parser.parse_args(arguments)
    if given.worst < 0:
        sys.stderr.write(f"{parser.prog}: error: --worst ({given.worst}) must be at least 0\n")
        return 2
    try:
        reports = overlap_report(_read(given.trace), match=given.match)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    for report in reports:
        _show(report, given.worst)
    if not reports:
        print(f"no transfer in {given.trace} matches {given.match!r}")
    return 0 if reports else 1


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            unpacked = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = unpacked.read(_MOST_BYTES + 1)
        trace = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path} must be a trace in JSON: {error}") from None
    if not isinstance(trace, dict):
        what = f"a JSON object of at most {_MOST_BYTES} bytes"
        raise ValueError(f"{path} must be a trace: {what}")  # noqa: TRY004 - it is read, not given
    return trace


def _show(report: OverlapReport, num_worst: int) -> None:
    print(
        f"process {report.process}: {len(report.transfers)} transfers, "
        f"{report.total / 1e3:.2f} ms, {report.fraction:.1%} hidden, "
        f"{(report.total - report.hidden) / 1e3:.2f} ms exposed"
    )
    origin = report.transfers[0].start
    for transfer in sorted(report.transfers, key=lambda t: -t.exposed)[:num_worst]:
        print(
            f"  at {(transfer.start - origin) / 1e3:9.2f} ms: {transfer.exposed / 1e3:7.2f} of "
            f"{(transfer.end - transfer.start) / 1e3:7.2f} ms exposed  {transfer.name}"
        )


if __name__ == "__main__":
    sys.exit(main())
