"""The command `python -m integration_tests.models.architectures`; torch is imported late."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from hp_base.atomic_write import replace_file
from hp_base.command_line import Parser, require_files, require_folder, say, write_named
from hp_base.errors import ConfigError, DifferenceError
from hp_transformers.stages.proven import TABLE, Table, read_table
from integration_tests.models.architectures.cells import EQUAL, KINDS, RED, Architecture, Cell
from integration_tests.models.architectures.compact import encoded, with_found
from integration_tests.models.architectures.kept import can_be_cut, folder_of, read, told, write
from integration_tests.models.architectures.page import page

FIRST = (
    *("llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2", "qwen3_next"),
    *("gemma3_text", "mistral", "gemma2", "phi3", "olmo2", "gpt2", "qwen3_5_text", "mamba2"),
    *("qwen2_moe", "deepseek_v2", "glm4_moe", "granite", "gemma", "gemma3", "cohere2", "olmoe"),
    *("qwen3_5_moe_text", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "glm4", "phi"),
    *("smollm3", "starcoder2", "stablelm", "gpt_neox", "opt", "bloom", "falcon", "gptj", "mamba"),
    *("llama4_text", "gemma4_text", "minimax", "jamba", "zamba2", "lfm2", "exaone4", "ernie4_5"),
)
"""Types of models that are looked at first, roughly as often as they are trained."""
_TO_DO = (
    "to do: look into every cell that is different or failed, and into those that do not train: "
    "a size that the rule does not shrink goes into "
    "integration_tests/models/architectures/overrides.py. "
    "Then --new --write --page docs/reference/tables/transformers-models.md, and once without "
    "--new: what they share may have changed as well"
)


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    made = Parser(
        prog="python -m integration_tests.models.architectures",
        description="Train tiny models of the causal architectures of transformers in every kind "
        "of layout of hp-train, and compare each with one process of transformers.",
        allow_abbrev=False,
    )
    made.add_argument(
        "models",
        nargs="*",
        metavar="TYPE",
        help="these, or a FOLDER with config.json and modeling code, which is run (default: all)",
    )
    made.add_argument(
        "--new", action="store_true", help="only what is not in the table, or has other code there"
    )
    made.add_argument(
        "--kinds", nargs="+", metavar="KIND", choices=list(KINDS), help="layouts (default: all)"
    )
    can_be_cut(made)
    made.add_argument("--again", action="store_true", help="also what is kept of these versions")
    made.add_argument("--write", action="store_true", help="put what was found into the table")
    made.add_argument("--page", metavar="FILE", help="the table, as a page of Markdown")
    return made


def run(arguments: Sequence[str]) -> int:
    """Find out, and tell.

    Args:
        arguments: What follows the command.

    Returns:
        0: no cell is different, and none failed.

    Raises:
        DifferenceError: When one is or did.
        ConfigError: When an architecture is asked for that there is not.
    """
    options = parser().parse_args(arguments)
    if find_spec("transformers") is None:
        raise ConfigError("this needs transformers: pip install transformers")
    require_files(options, "page")
    require_folder("--results", options.results)
    until = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    table = read_table()
    with folder_of(options.results, "hp-models-") as folder:
        found = _examine_all(options, table, Path(folder), until)
    if options.write:
        table = with_found(table, found.values())
        replace_file(TABLE, encoded(table))
    if options.page:
        write_named("--page", options.page, page(table))
    say(summary(list(found.values())))
    red = [f"{one.name} ({c.kind})" for one in found.values() for c in one.cells if c.state in RED]
    if red:
        more = f" and {len(red) - 4} more" if len(red) > 4 else ""
        raise DifferenceError(f"different from one process: {', '.join(red[:4])}{more}")
    return 0


def summary(found: Sequence[Architecture]) -> str:
    """How many cells are what, in a line for each kind."""
    lines = []
    for kind in KINDS:
        cells = [cell for one in found if (cell := one.cell(kind)) is not None]
        states = sorted({cell.state for cell in cells})
        counts = [f"{sum(c.state == state for c in cells)} {state}" for state in states]
        lines += [f"{kind}: {', '.join(counts)}"] if cells else []
    unmade = sum(not one.cells for one in found)
    if unmade:
        lines.append(f"{unmade} architectures do not train in one process")
    return "\n".join(lines)


def _examine_all(
    options: argparse.Namespace, table: Table, folder: Path, until: float
) -> Mapping[str, Architecture]:
    """Examine what is asked for and is not there yet; returns all of it that is there now."""
    from integration_tests.models.architectures import examine, task, tiny  # noqa: PLC0415 - needs transformers

    examine.prepare()
    names = _names(options.models, tiny.names())
    if options.new:
        names = new_of(names, tiny.names(), table, tiny.Tiny, tiny.versions())
    kinds = options.kinds or list(KINDS)
    found = {
        n: one for n, one in read(folder, Architecture).items() if one.versions == tiny.versions()
    }
    with TemporaryDirectory(prefix="hp-models-") as text:
        data = Path(text) / "data"
        reason = examine.run_in_fork(lambda: task.make_data(data), Path(text) / "log")
        if reason:
            raise ConfigError(f"the text could not be made: {reason}")
        for name in names:
            known = found.get(Path(name).name)
            missing = kinds if options.again or _is_folder(name) else _missing(known, kinds)
            if missing and time.monotonic() > until:
                say("out of time; the same command goes on")
                break
            if missing:
                one = examine.examine(name, data, missing)
                found[one.name] = one if known is None else _joined(known, one)
                write(folder, found[one.name])
                say(_line(one))
    asked = {Path(name).name for name in names}
    return {name: one for name, one in sorted(found.items()) if name in asked}


def _missing(known: Architecture | None, kinds: Sequence[str]) -> Sequence[str]:
    """Kinds of cells that are not there, or red."""
    if known is None:
        return kinds
    cells = {cell.kind for cell in known.cells if cell.state not in RED}
    return [kind for kind in kinds if kind not in cells] if known.cells else []


def _joined(known: Architecture, new: Architecture) -> Architecture:
    """What was found anew in the place of what was known."""
    if new.digest != known.digest or not new.cells:
        return new
    cells = {cell.kind: cell for cell in (*known.cells, *new.cells)}
    return replace(new, cells=tuple(cells[kind] for kind in KINDS if kind in cells))


def _is_folder(name: str) -> bool:
    return (Path(name) / "config.json").is_file()


def _names(asked: Sequence[str], installed: Sequence[str]) -> list[str]:
    if not asked:
        first = [name for name in FIRST if name in installed]
        return [*first, *(name for name in installed if name not in first)]
    for name in asked:
        if name not in installed and not _is_folder(name):
            raise ConfigError(
                f"--models ({name}) must be a causal model of transformers, or a folder with "
                "config.json"
            )
    return list(asked)


def new_of(
    names: Sequence[str],
    installed: Sequence[str],
    table: Table,
    tiny: Callable[[str], Any],
    versions: Mapping[str, str],
) -> list[str]:
    """What is not in the table, or has other code there; tells what has become of the rest.

    Args:
        names: Architectures to look at.
        installed: All that there is.
        table: Table of earlier runs.
        tiny: Makes the `Tiny` of a name.
        versions: What is installed.
    """
    digests = {}
    for name in names:
        try:
            digests[name] = tiny(name).digest
        except Exception:  # noqa: BLE001 - whatever a config refuses; the table tells of that
            digests[name] = ""
    new = [name for name in names if name not in table.rows]
    changed = [n for n in names if n in table.rows and table.rows[n].digest != digests[n]]
    gone = [name for name in table.rows if name not in installed]
    say(
        f"transformers {versions['transformers']}, the table is of "
        f"{table.versions.get('transformers', 'none')}: {len(new)} new, {len(changed)} with other "
        f"code, {len(gone)} gone"
    )
    for what, some in (("new", new), ("other code", changed), ("gone", gone)):
        if some:
            say(f"{what}: {', '.join(some)}")
    if new or changed:
        say(_TO_DO)
    return [*new, *changed]


def _line(one: Architecture) -> str:
    if not one.cells:
        return f"{one.name}: {one.reason}"
    equal = [cell for cell in one.cells if cell.state == EQUAL]
    largest = max((cell.error or 0.0 for cell in equal), default=0.0)
    others = [
        f"{cell.kind} {cell.state}: {_first(cell)}" for cell in one.cells if cell.state != EQUAL
    ]
    seconds = one.seconds + sum(cell.seconds for cell in one.cells)
    return "; ".join(
        [f"{one.name}: {len(equal)} equal ({told(largest)})", *others, f"{seconds:.1f} s"]
    )


def _first(cell: Cell) -> str:
    worst = f"{told(cell.error)} {cell.worst}".strip() if cell.compared else ""
    return " ".join(filter(None, [worst, cell.reason]))
