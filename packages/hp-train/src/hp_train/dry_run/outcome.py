"""What a dry run says and leaves behind, and how it ends."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_platform.dry.trace import Trace
from hp_train.dry_run.curve import curve_svg
from hp_train.dry_run.page import page
from hp_train.dry_run.report import report
from hp_train.dry_run.summary import Summary, to_json
from hp_train.errors import ConfigError, RehearsalError


def show(summary: Summary, traces: Sequence[Trace], options: argparse.Namespace) -> int:
    """Print what was found, and write what is asked for.

    Args:
        summary: What the dry run found.
        traces: Traces of the ranks that were run.
        options: Parsed flags of `hp_train.dry_run.command.add_arguments`.

    Returns:
        0: nothing is wrong.

    Raises:
        ConfigError: When a file cannot be written.
        RehearsalError: When something is wrong; it was printed.
    """
    text = to_json(summary).decode() if options.json else "\n".join(report(summary))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    worst = summary.worst
    if options.html:
        _write("--html", options.html, page(summary))
    if options.svg:
        title = f"{summary.name}, rank {worst.rank}"
        curve = curve_svg(worst.memory, title=title, gpu_bytes=summary.gpu_bytes)
        _write("--svg", options.svg, curve)
    if options.traces:
        folder = Path(options.traces)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for trace in traces:
                trace.write(folder / f"rank-{trace.rank:05d}.jsonl")
        except OSError as error:
            raise _unwritten("--traces", options.traces, error) from None
    if summary.problems:
        number = len(summary.problems)
        several = f"{number} problems, first" if number > 1 else "a problem"
        raise RehearsalError(f"{several}: {summary.problems[0]}")
    return 0


def _write(flag: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise _unwritten(flag, name, error) from None


def _unwritten(flag: str, name: str, error: OSError) -> ConfigError:
    return ConfigError(f"{flag} ({name}) must be a file that can be written: {error.strerror}")
