"""The command ``hp step-plan``: steps of documents of real lengths, planned and compared."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from hp_base.command_line import require_files, write_named
from hp_base.errors import ConfigError
from hp_base.numbers import whole
from hp_plan.layouts.command import known_machine, known_vocab_size
from hp_trainer.config.options import Resolved

if TYPE_CHECKING:
    from hp_packing.comparison import Comparison

SUMMARY = "plan steps of documents of many lengths, and compare them with those of other rules"
"""What the command does, for `hp --help`."""
_K = 1024
DISTRIBUTIONS = ("mock", "lognormal-2k", "lognormal-8k", "log-uniform", "few-long", "source-files")
_COUNTS = {
    "stages": (4, "stages of the pipeline, one on each rank"),
    "ranks": (32, "ranks of a stage, data and context parallel"),
    "memory": (64 * _K, "tokens whose activations fit into a rank at once"),
    "tokens": (4096 * _K, "tokens of a global batch"),
    "pack": (128 * _K, "tokens of a pack, and of the longest document"),
    "degree": (8, "ranks that share a pack in the plans of others"),
    "batches": (4, "batches that are drawn, or read, at most"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--lengths", metavar="FILE", help="lengths of documents, in their order")
    source.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="lognormal-2k",
        help="what lengths are drawn from (default: lognormal-2k)",
    )
    for name, (default, what) in _COUNTS.items():
        parser.add_argument(
            f"--{name}",
            type=whole(f"--{name}", least=1, largest=2**40),
            default=default,
            metavar="N",
            help=f"{what} (default: {default})",
        )
    parser.add_argument("--seed", type=whole("--seed", least=0), default=0, help="of the draws")
    parser.add_argument(
        "--machine", default="h100", metavar="NAME", help="as of hp plan (default: h100)"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the first plan")
    parser.add_argument("--plan", metavar="FILE", help="write the first plan as text")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(resolved: Resolved, options: argparse.Namespace) -> int:
    """Compare rules on some batches, and print a table."""
    from hp_packing import (  # noqa: PLC0415 - torch
        Pipeline,
        Planner,
        learned_costs,
        step_layout,
        to_text,
    )
    from hp_packing.comparison import compare  # noqa: PLC0415 - torch

    if options.ranks % options.degree:
        raise ConfigError(f"--degree ({options.degree}) must divide --ranks ({options.ranks})")
    if options.pack > options.memory * options.degree:
        raise ConfigError(
            f"--pack ({options.pack}) must be at most --memory ({options.memory}) times --degree "
            f"({options.degree})"
        )
    require_files(options, "plan", "svg")
    machine = known_machine(options.machine)
    batches = _batches(options)
    layout = step_layout(resolved.config, stages=options.stages, ranks=options.ranks)
    costs = learned_costs(layout, machine, vocab_size=known_vocab_size(layout))
    pipeline = Pipeline(options.stages, options.ranks, options.memory)
    planner = Planner(costs, pipeline, typical=batches)
    found = [compare(batch, planner, pack=options.pack, degree=options.degree) for batch in batches]
    if options.plan:
        write_named("--plan", options.plan, to_text(planner.plan(batches[0])))
    if options.svg:
        from hp_schedule import timeline_svg  # noqa: PLC0415 - only where it is asked for

        write_named("--svg", options.svg, timeline_svg({"planned step": found[0].timeline}))
    rows = _rows(found, bytes_of_key=costs.stages[0].key * machine.bandwidth)
    text = json.dumps(rows, indent=2) if options.json else "\n".join(_lines(rows, found, options))
    sys.stdout.write(f"{text}\n")
    problems = [problem for each in found for problem in each.problems]
    for problem in problems:
        sys.stderr.write(f"not proven: {problem}\n")
    return 1 if problems else 0


def _batches(options: argparse.Namespace) -> list[list[int]]:
    from hp_packing.generators import drawn  # noqa: PLC0415

    return drawn(
        Path(options.lengths) if options.lengths else options.distribution,
        tokens=options.tokens,
        longest=options.pack,
        number=options.batches,
        seed=options.seed,
    )


def _rows(found: list[Comparison], *, bytes_of_key: float) -> list[dict[str, str | float]]:
    """Return a row for each rule, the mean over batches; bytes are of one forward of a stage."""
    rows: list[dict[str, str | float]] = []
    for name in dict.fromkeys(row.name for each in found for row in each.rows):
        of_rule = [each.by_name[name] for each in found if name in each.by_name]
        rows.append(
            {
                "rule": name,
                "batches": len(of_rule),
                "seconds": mean(row.seconds for row in of_rule),
                "step / pure work": mean(row.factor for row in of_rule),
                "worst": max(row.factor for row in of_rule),
                "tokens held": max(row.tokens for row in of_rule),
                "gibibytes exchanged": mean(row.fetched for row in of_rule) * bytes_of_key / 2**30,
            }
        )
    bound = mean(each.bound / each.pure for each in found)
    rows.append({"rule": "bound of any plan", "batches": len(found), "step / pure work": bound})
    return rows


def _lines(
    rows: list[dict[str, str | float]], found: list[Comparison], options: argparse.Namespace
) -> list[str]:
    source = options.lengths or options.distribution
    ranks = f"{options.stages} stages of {options.ranks} ranks"
    heads = ("seconds", 9), ("/ pure", 9), ("worst", 9), ("tokens held", 13), ("GiB of keys", 12)
    lines = [
        (
            f"{len(found)} batches of {options.tokens} tokens, {source}; {ranks}, packs of "
            f"{options.pack}, memory for {options.memory} tokens"
        ),
        " " * 24 + "".join(f"{head:>{width}}" for head, width in heads),
    ]
    *of_rules, bound = rows
    for row in of_rules:
        numbers = f"{row['seconds']:9.2f}{row['step / pure work']:9.3f}{row['worst']:9.3f}"
        held = f"{row['tokens held']:13.0f}{row['gibibytes exchanged']:12.2f}"
        lines.append(f"{row['rule']:24}{numbers}{held}")
    lines.append(f"{bound['rule']:24}{'':9}{bound['step / pure work']:9.3f}")
    took = mean(each.cpu_seconds for each in found)
    share = took / mean(each.rows[-1].seconds for each in found)
    lines.append(f"planning took {took:.3f} CPU s a step, {share:.1%} of it")
    return lines
