"""The command ``python -m integration_tests.jobs.demo``; torch is imported when it runs."""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hp_base.command_line import Parser, require_files, require_folder, say, write_named
from hp_base.errors import ConfigError, DifferenceError
from integration_tests.jobs.demo.cells import DIFFERENT, DOUBTED, FAILED, Architecture, Bred
from integration_tests.jobs.demo.page import page
from integration_tests.jobs.demo.table import table
from integration_tests.jobs.zoo.bugs import BUGS, REPORTS, SOUND
from integration_tests.models.architectures.kept import can_be_cut, folder_of, read, write

SHOWN = (
    *(
        "llama",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "mistral",
        "phi",
        "phi3",
        "gpt2",
    ),
    *("gpt_neox", "olmo", "olmo2", "cohere", "cohere2", "granite", "glm", "glm4", "starcoder2"),
    *("stablelm", "smollm3", "helium", "opt", "bloom", "falcon", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe", "phimoe"),
)
"""Architectures that the demo takes by itself; some of many families."""


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    made = Parser(
        prog="python -m integration_tests.jobs.demo",
        description="Look for the bugs of the zoo, and compare architectures of transformers in "
        "its own layouts (fsdp, tp, ep) on two ranks with one process.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--architectures", nargs="*", metavar="TYPE", help="these (default: some of many families)"
    )
    made.add_argument("--all", action="store_true", help="all causal models that are installed")
    made.add_argument("--no-zoo", action="store_true", help="architectures alone")
    can_be_cut(made)
    made.add_argument("--output", default="hp-verify-demo.html", metavar="FILE", help="the page")
    made.add_argument("--table", metavar="FILE", help="the architectures, as a page of Markdown")
    return made


def run(arguments: Sequence[str]) -> int:
    """Find out and write a page.

    Args:
        arguments: What follows the command.

    Returns:
        0: whatever transformers' layouts compute, the tool has found and missed what it must.

    Raises:
        DifferenceError: When a bug of the zoo was not found, or a sound job was called different.
    """
    options = parser().parse_args(arguments)
    require_files(options, "output", "table")
    require_folder("--results", options.results)
    began = time.monotonic()
    until = began + 60.0 * options.minutes if options.minutes else float("inf")
    zoo = [] if options.no_zoo else list(_told(_zoo(), until))
    found = list(_architectures(options, until).values())
    seconds = time.monotonic() - began
    write_named("--output", options.output, page(zoo, found, seconds))
    if options.table:
        write_named("--table", options.table, table(found))
    say(f"{summary(zoo, found)}\nwritten to {options.output}")
    wrong = [one for one in zoo if not one.is_right]
    if wrong:
        raise DifferenceError(f"{len(wrong)} of {len(zoo)} jobs of the zoo are not told rightly")
    return 0


def summary(zoo: Sequence[Bred], found: Sequence[Architecture]) -> str:
    """What was found, in a few lines."""
    bugs, sound = ([one.is_right for one in zoo if bool(one.bug) is bug] for bug in (True, False))
    told = f"zoo: {sum(bugs)} of {len(bugs)} bugs found and named, "
    lines = [f"{told}{sum(sound)} of {len(sound)} sound jobs equal"] if zoo else []
    for layout in dict.fromkeys(cell.layout for one in found for cell in one.cells):
        states = Counter(c.state for one in found for c in one.cells if c.layout == layout)
        lines.append(f"{layout}: " + ", ".join(f"{n} {s}" for s, n in sorted(states.items())))
    unmade = sum(not one.cells for one in found)
    if unmade:
        lines.append(f"{unmade} architectures do not train in one process")
    return "\n".join(lines)


def _zoo() -> Iterator[Bred]:
    from integration_tests.jobs.demo.found import look_for  # noqa: PLC0415 - needs torch

    return look_for([*BUGS, *REPORTS], [*SOUND, *(bug.layout for bug in REPORTS)])


def _told(found: Iterator[Bred], until: float) -> Iterator[Bred]:
    for one in found:
        what = f"{one.layout} {one.bug}" if one.bug else f"{one.layout}, sound"
        say(f"{'ok  ' if one.is_right else 'FAIL'} zoo: {what}: {one.first or 'equal'}")
        yield one
        if time.monotonic() > until:
            return


def _architectures(options: argparse.Namespace, until: float) -> dict[str, Architecture]:
    if find_spec("transformers") is None:
        say("architectures: pip install transformers compares them as well")
        return {}
    from integration_tests.jobs.demo.architectures import examine  # noqa: PLC0415
    from integration_tests.models.architectures import tiny  # noqa: PLC0415 - needs transformers

    installed = tiny.names()
    asked = options.architectures or [name for name in SHOWN if name in installed]
    names = installed if options.all else asked
    unknown = [name for name in names if name not in installed]
    if unknown:
        raise ConfigError(f"--architectures ({unknown[0]}) must be a causal model of transformers")
    tiny.prepare()
    versions = tiny.versions()
    with folder_of(options.results, "hp-demo-") as kept:
        folder = Path(kept)
        found = {
            n: one for n, one in read(folder, Architecture).items() if one.versions == versions
        }
        for name in names:
            if name in found or time.monotonic() > until:
                continue
            found[name] = one = examine(name)
            write(folder, one)
            say(f"{name}: {_line(one)} ({one.seconds:.1f} s)")
    return dict(sorted(found.items()))


def _line(one: Architecture) -> str:
    if not one.cells:
        return one.reason
    told = []
    for cell in one.cells:
        more = {
            DIFFERENT: f": {cell.first}",
            DOUBTED: f": {cell.first}{cell.reason}",
            FAILED: f": {cell.reason}",
        }.get(cell.state, "")
        told.append(f"{cell.layout} {cell.state}{more}")
    return "; ".join(told)
