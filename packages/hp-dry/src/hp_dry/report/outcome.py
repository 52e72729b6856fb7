"""Outcome of a dry run: what it says and leaves behind, and how it ends."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hp_base.command_line import say, write_named
from hp_base.errors import ConfigError, RehearsalError
from hp_base.folder import why_not
from hp_dry.report.curve import curve_svg
from hp_dry.report.page import page
from hp_dry.report.report import report
from hp_dry.report.summary import Summary, to_json
from hp_dry.trace import Trace


def show(summary: Summary, traces: Sequence[Trace], options: argparse.Namespace) -> int:
    """Print what was found, and write what is asked for.

    Args:
        summary: What the dry run found.
        traces: Traces of the ranks that were run.
        options: Parsed flags of `hp_dry.flags.add_flags`.

    Returns:
        0: nothing is wrong.

    Raises:
        ConfigError: When a file cannot be written.
        RehearsalError: When something is wrong; it was printed.
    """
    text = to_json(summary).decode() if options.json else "\n".join(report(summary))
    say(text)
    worst = summary.worst
    if options.html:
        write_named("--html", options.html, page(summary))
    if options.svg:
        curve = curve_svg(
            worst.memory, title=f"{summary.name}, rank {worst.rank}", gpu_bytes=summary.gpu_bytes
        )
        write_named("--svg", options.svg, curve)
    if options.traces:
        folder = Path(options.traces)
        try:
            for trace in traces:
                trace.write(folder / f"rank-{trace.rank:05d}.jsonl")
        except OSError as error:
            why = why_not(error)
            raise ConfigError(f"--traces ({folder}) must be a writable folder: {why}") from None
    if summary.problems:
        number = len(summary.problems)
        several = f"{number} problems, first" if number > 1 else "a problem"
        raise RehearsalError(f"{several}: {summary.problems[0]}")
    return 0
