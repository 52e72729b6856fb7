"""The command ``hp``."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeAlias

from hp_base.command_line import Parser, run_command
from hp_base.errors import ConfigError
from hp_base.messages import did_you_mean
from hp_base.numbers import whole
from hp_base.own_caches import own_caches, own_temporary_folder
from hp_train import __version__
from hp_train.dry_run import command as dry_run
from hp_train.verify import command as verify
from hp_trainer.config import rules
from hp_trainer.config.aliases import absent
from hp_trainer.config.options import (
    Resolved,
    resolve,
    shipped,
    split_overrides,
    to_json,
    to_lines,
    to_toml,
)
from hp_trainer.config.schema import keys_called
from hp_trainer.launch.last_word import leave_last_word
from hp_trainer.layout.ranks import Layout
from hp_trainer.plugins import planned_steps
from hp_trainer.training.resuming import require_same_run

_Run: TypeAlias = Callable[[argparse.Namespace], int]
_FLAG = re.compile(r"--[\w-]+")
_JOBS = (
    " Any training program beside another, checkpoints and curves of losses are compared by the "
    "command hp-verify."
)
_SCRIPTS = " A script of torch alone: hp-dry -- SCRIPT."
_OVERRIDES = "--section.key value, --section.key=value or section.key=value sets any key."


class Command(Protocol):
    """A module that adds a command, which takes a config, by an entry point of `hp.commands`.

    Attributes:
        SUMMARY: Purpose of the command in one line, for `hp --help`.
    """

    SUMMARY: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags of the command."""

    @staticmethod
    def run(resolved: Resolved, options: argparse.Namespace) -> int:
        """Run the command; `options.overrides` has the overrides. Return the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; None: those of this process, which is then at its end.

    Returns:
        Exit status, see `hp_base.errors`.
    """

    def run(arguments: Sequence[str]) -> int:
        # What only says something compiles nothing, and scripts of others have caches of their own.
        is_quiet = not arguments or arguments[0] in ("config", "doctor") or "--" in arguments
        if argv is None and not is_quiet:
            own_temporary_folder(os.environ)
            own_caches(os.environ)
        return _main(arguments)

    # By whichever rank comes first: torchrun ends the others, maybe before they have spoken.
    return run_command(run, argv, on_error=leave_last_word)


def _main(argv: Sequence[str]) -> int:
    _refuse_moved(argv)
    overrides, rest = split_overrides(_joined(argv))
    parser, commands = _parser()
    _refuse_bare_keys(rest, commands)
    options = parser.parse_args(rest)
    if "config" not in options and overrides:
        raise ConfigError(f"hp {options.command} takes no --{overrides[0][0]}")
    given: list[tuple[str, object]] = [*overrides]
    if getattr(options, "data", None):
        given.append(("data.paths", options.data))
    if getattr(options, "resume", None) is not None:
        given.append(("run.resume", options.resume))
    options.overrides = given
    run: _Run = options.run_command
    return run(options)


def _refuse_moved(argv: Sequence[str]) -> None:
    """Name the command that does what `hp verify` and `hp dry-run` do not.

    Raises:
        ConfigError: When one is asked for.
    """
    if argv[:1] == ["verify"]:
        flags = ("--checkpoint", "--manifest", "--curves", "--")
        if asked := next((flag for flag in flags if flag in argv), None):
            raise ConfigError(f"hp verify takes a config: run hp-verify {asked} ...")
    if argv[:1] == ["dry-run"] and "--" in argv:
        raise ConfigError("hp dry-run takes a config; hp-dry [FLAGS] -- SCRIPT runs a script")


def _of_config(run: Callable[[Resolved, argparse.Namespace], int]) -> _Run:
    """Return a command that resolves its config, and tries a tokenizer out, before it runs."""

    def resolved_first(options: argparse.Namespace) -> int:
        resolved = resolve(options.config, options.overrides)
        data = resolved.config.data
        if data.tokenizer:
            from hp_data.encode import try_out  # noqa: PLC0415 - only where there is one

            try_out(data.tokenizer, data.separator)
        return run(resolved, options)

    return resolved_first


def _train(resolved: Resolved, options: argparse.Namespace) -> int:
    run, data, model = resolved.config.run, resolved.config.data, resolved.config.model
    if run.resume:
        require_same_run(resolved)
    if data.packing == "planned":
        planned_steps()  # which ranks load
    if data.paths or (options.dry_run and any((data.tokenizer, run.init_from, model.vocab_size))):
        from hp_trainer.training.beforehand import refuse_beforehand  # noqa: PLC0415 - only here

        refuse_beforehand(resolved.config, weights=options.dry_run)
    if options.dry_run:
        return _dry_run(resolved)
    from hp_train.gathering import with_gather_decided  # noqa: PLC0415 - only what trains needs it
    from hp_trainer.launch import launcher  # noqa: PLC0415 - likewise

    return launcher.run(with_gather_decided(resolved))


def _parser() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser of ``hp``, and those of its commands by their names."""
    parser = Parser(prog="hp", description="Train mixture-of-experts language models.")
    parser.add_argument("--version", action="version", version=f"hp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train = _add_command(commands, "train", _of_config(_train), what="train a model")
    train.add_argument("--dry-run", action="store_true", help="check the config and stop")
    what = "print a config with the meaning of every key"
    config = _add_command(commands, "config", _print_config, what=what)
    form = config.add_mutually_exclusive_group()
    form.add_argument("--origins", action="store_true", help="one line per key, no help")
    form.add_argument("--json", action="store_true", help="as JSON, with origins")
    run_verify = _of_config(verify.run)
    verify.add_arguments(
        _add_command(commands, "verify", run_verify, what=verify.SUMMARY, more=_JOBS)
    )
    dry_run.add_arguments(
        _add_command(commands, "dry-run", dry_run.run, what=dry_run.SUMMARY, more=_SCRIPTS)
    )
    for point in sorted(entry_points(group="hp.commands"), key=lambda point: point.name):
        added: Command = point.load()
        run = _of_config(added.run)
        added.add_arguments(_add_command(commands, point.name, run, what=added.SUMMARY))
    doctor = commands.add_parser(
        "doctor", help="tell what this machine can run", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run_command=_doctor)
    _add_hugging_face(commands)
    _add_plain_checkpoint(commands)
    return parser, dict(commands.choices)


def _add_hugging_face(commands: "argparse._SubParsersAction[Parser]") -> None:
    imports = commands.add_parser(
        "import-hf",
        help="print a config that starts from a Hugging Face model",
        allow_abbrev=False,
    )
    imports.add_argument("folder", metavar="FOLDER", help="with config.json and safetensors files")
    imports.add_argument("--out", metavar="FILE", help="write the config to a new .toml file")
    imports.set_defaults(run_command=_import_hugging_face)
    exports = _add_export(commands, "export-hf", what="write a checkpoint as a Hugging Face model")
    exports.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float64"),
        help="of the files (what they came in, or what the run computes in)",
    )
    exports.add_argument(
        "--tokenizer", metavar="FILE", help="to be copied (that in the run directory)"
    )
    exports.add_argument(
        "--original",
        metavar="FOLDER",
        help="of the model that the run started from, for its other files (what the run has kept)",
    )
    exports.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of that model, where its config.json names some",
    )
    exports.set_defaults(run_command=_export_hugging_face)


def _doctor(options: argparse.Namespace) -> int:
    from hp_train.doctor import main as doctor  # noqa: PLC0415 - imports torch

    return doctor(as_json=options.json)


# What is not there is told before torch is imported, which takes seconds.
def _import_hugging_face(options: argparse.Namespace) -> int:
    rules.require_model_folder(options.folder)
    from hp_transformers.families import command  # noqa: PLC0415 - imports torch

    return command.import_hf(Path(options.folder), Path(options.out) if options.out else None)


def _export_hugging_face(options: argparse.Namespace) -> int:
    rules.require_run_directory(options.run)
    from hp_transformers.families import command  # noqa: PLC0415 - imports torch
    from hp_transformers.stages.export import write_folder  # noqa: PLC0415 - likewise

    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(f"--tokenizer ({tokenizer}) must be a file")
    original = Path(options.original) if options.original else None
    if original is not None and not original.is_dir():
        raise ConfigError(f"--original ({original}) must be a folder")
    return command.export_hf(
        Path(options.run),
        Path(options.folder),
        step=options.step,
        dtype=options.dtype,
        tokenizer=tokenizer,
        original=original,
        trust_remote_code=options.trust_remote_code,
        of_transformers=write_folder,
    )


def _add_plain_checkpoint(commands: "argparse._SubParsersAction[Parser]") -> None:
    imports = commands.add_parser(
        "import-dcp",
        help="make a run that goes on from a checkpoint of torch.distributed.checkpoint",
        epilog=_OVERRIDES,
        allow_abbrev=False,
    )
    imports.add_argument("folder", metavar="FOLDER", help="with .metadata and .distcp files")
    imports.add_argument("run", metavar="RUN", help="run directory, to be made")
    imports.add_argument(
        "config", metavar="CONFIG", nargs="?", help="of the run (what FOLDER was exported with)"
    )
    imports.add_argument(
        "--step", type=whole("--step", least=0), metavar="N", help="steps that were trained"
    )
    imports.set_defaults(run_command=_import_plain_checkpoint)
    what = "write a checkpoint as torch.distributed.checkpoint would"
    exports = _add_export(commands, "export-dcp", what=what)
    exports.set_defaults(run_command=_export_plain_checkpoint)


def _add_export(commands: "argparse._SubParsersAction[Parser]", name: str, *, what: str) -> Parser:
    """Add a command that writes a checkpoint of a run in another format."""
    parser = commands.add_parser(name, help=what, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("folder", metavar="FOLDER", help="to be made")
    parser.add_argument(
        "--step", type=whole("--step", least=0), metavar="N", help="of the checkpoint (newest)"
    )
    return parser


def _export_plain_checkpoint(options: argparse.Namespace) -> int:
    rules.require_run_directory(options.run)
    from hp_train.dcp_command import export_dcp  # noqa: PLC0415 - imports torch

    return export_dcp(Path(options.run), Path(options.folder), step=options.step)


def _import_plain_checkpoint(options: argparse.Namespace) -> int:
    from hp_train.dcp_command import import_dcp  # noqa: PLC0415 - imports torch

    given = options.overrides
    resolved = resolve(options.config, given) if options.config or given else None
    folder, run = Path(options.folder), Path(options.run)
    return import_dcp(folder, run, resolved=resolved, step=options.step)


def _add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    run: _Run,
    *,
    what: str,
    more: str = "",
) -> Parser:
    """Add a command that takes a config."""
    parser = commands.add_parser(name, help=what, epilog=_OVERRIDES + more, allow_abbrev=False)
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help=f"a .toml file, or one that comes along: {', '.join(shipped())} (default: quickstart; "
        "with --model.transformers none)",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="files, folders or patterns of text to train on; short for --data.paths",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with the run of this directory")
    parser.set_defaults(run_command=run)
    return parser


def _refuse_bare_keys(arguments: Sequence[str], commands: Mapping[str, Parser]) -> None:
    """Point ``--steps`` to ``--train.steps``; argparse would take its value for the config."""
    command = next((argument for argument in arguments if argument in commands), "train")
    flags = (*_FLAG.findall(commands[command].format_usage()), "--help", "--version")
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag == "--":
            return
        if not flag.startswith("--") or flag in flags:
            continue
        name = flag[2:].replace("-", "_")
        if reason := absent().get(name.lower()):
            raise ConfigError(f"{flag} is not a known option: {reason}")
        hint = did_you_mean(name, [flag[2:] for flag in flags]).replace("mean ", "mean --")
        if not hint and (meant := keys_called(name)):
            hint = "; did you mean " + " or ".join(f"--{key}" for key in meant) + "?"
        raise ConfigError(f"{flag} is not a known option{hint}")


def _joined(argv: Sequence[str]) -> list[str]:
    """Join ``--against`` and its value, which may look like an override."""
    joined = list(argv)
    if "--against" in joined[:-1]:
        index = joined.index("--against")
        joined[index : index + 2] = [f"--against={joined[index + 1]}"]
    return joined


def _print_config(options: argparse.Namespace) -> int:
    resolved = resolve(options.config, options.overrides)
    if options.json:
        text = to_json(resolved)
    elif options.origins:
        text = to_lines(resolved)
    else:
        text = to_toml(resolved.config, resolved.origins)
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _dry_run(resolved: Resolved) -> int:
    config, train = resolved.config, resolved.config.train
    sys.stdout.write(
        f"config {resolved.name} is good: {config.world_size} processes, "
        f"{Layout.of(config.mesh)}, {train.steps} steps of "
        f"{train.global_batch_size} sequences x {config.data.seq_len} tokens\n"
    )
    return 0
