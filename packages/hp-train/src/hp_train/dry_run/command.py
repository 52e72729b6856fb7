"""The command ``hp dry-run``. Nothing here imports torch before ranks are to be started."""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError
from hp_base.numbers import whole
from hp_dry.cli import add_flags, require_places
from hp_plan.costs.machine import machine_found
from hp_plan.costs.routing import parse_skew
from hp_plan.layouts.command import known_vocab_size, lengths_plugin
from hp_plan.price.estimate import decided
from hp_trainer.config import Config, rules
from hp_trainer.config.options import COMMAND_LINE, resolve, with_keys

SUMMARY = "run the real code of every kind of rank of a cluster, without a GPU"
"""What the command does, for `hp --help`."""
_STEPS = 2
_PATIENCE = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_flags(
        parser,
        gpus="devices of the cluster: mesh.dp_shard is what fills them (default: of the mesh)",
    )
    parser.add_argument(
        "--skew",
        action="append",
        metavar="HOW",
        help="what experts get: uniform, gini=0.4, or a JSON file of shares; may be given again "
        "(default: uniform)",
    )
    parser.add_argument(
        "--documents",
        type=whole("--documents", least=1),
        metavar="N",
        help="documents in each sequence (default: one for 1024 tokens)",
    )
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="a file of lengths, or a distribution's name: of many sequences, one with as much "
        "attention as half of them (p50), and one that few exceed (p99), are rehearsed",
    )
    parser.add_argument(
        "--steps",
        type=whole("--steps", least=1),
        default=_STEPS,
        help=f"updates of the weights; the last one is looked at (default: {_STEPS})",
    )


def run(options: argparse.Namespace) -> int:
    """Rehearse a config.

    Args:
        options: Parsed flags of `add_arguments`, and `overrides` from the command line.

    Returns:
        0: the ranks fit together, and nothing would be refused by a device.

    Raises:
        ConfigError: When it cannot be rehearsed.
        RehearsalError: When a run would fail.
    """
    resolved = resolve(options.config, options.overrides, fit=fit_to(options.gpus))
    if resolved.config.data.tokenizer:
        from hp_data.encode import try_out  # noqa: PLC0415 - imports numpy

        try_out(resolved.config.data.tokenizer, resolved.config.data.separator)
    most = resolved.config.data.seq_len
    if options.documents is not None and options.documents > most:
        raise ConfigError(
            f"--documents ({options.documents}) must be at most data.seq_len ({most})"
        )
    require_places(options)
    require_possible(resolved.config, options.rank)
    skews = [parse_skew(text, resolved.config.model) for text in options.skew or ["uniform"]]
    from hp_dry.rehearsal import show  # noqa: PLC0415
    from hp_train.dry_run.rehearsal import rehearse  # noqa: PLC0415 - imports torch

    config = dry_config(resolved.config, gpus_per_node=options.gpus_per_node)
    lengths_of = _typical(config, options) if options.lengths else {"": None}
    for label, lengths in lengths_of.items():
        with tempfile.TemporaryDirectory(prefix="hp-dry-run-") as folder:
            found = rehearse(
                config,
                skews,
                name=f"{resolved.name}{label}",
                data=write_data(config, Path(folder), documents=options.documents, lengths=lengths),
                steps=options.steps,
                apart=options.rank,
                gpus_per_node=options.gpus_per_node,
            )
        show(*found, options)
    return 0


def _typical(config: Config, options: argparse.Namespace) -> Mapping[str, Sequence[int] | None]:
    """Return a typical and a long sequence of a distribution, by attention, with their names."""
    if config.data.paths or config.data.documents != "separate" or options.documents:
        raise ConfigError(
            f"--lengths ({options.lengths}) must come without data.paths and --documents, and with "
            "data.documents separate: it says how long documents are"
        )
    found = lengths_plugin(options.lengths).typical_sequences(
        options.lengths, seq_len=config.data.seq_len
    )
    return {f", {options.lengths} {label}": lengths for label, lengths in found.items()}


def fit_to(gpus: int | None) -> Callable[[Config, Mapping[str, str]], Mapping[str, object]]:
    """Let FSDP fill the devices, and the batch be cut into whole microbatches.

    Args:
        gpus: Number of devices to fill; None: as many as the mesh has.

    Returns:
        The `fit` of `resolve`: from a config and its origins to values of other keys.
    """

    def fit(config: Config, origins: Mapping[str, str]) -> dict[str, object]:
        values: dict[str, object] = {"launch.num_processes": 0}
        if gpus is not None and gpus != config.world_size:
            others = config.world_size // config.mesh.dp_shard
            if origins.get("mesh.dp_shard") == COMMAND_LINE or gpus % others:
                raise ConfigError(
                    f"--gpus ({gpus}) must equal the ranks of the mesh ({config.world_size}), or "
                    f"leave mesh.dp_shard to it and be a multiple of the others ({others})"
                )
            values["mesh.dp_shard"] = gpus // others
        if origins.get("train.global_batch_size") != COMMAND_LINE:
            values["train.global_batch_size"] = _batch_size(with_keys(config, values))
        return values

    return fit


def _batch_size(config: Config) -> int:
    """Return the configured batch size, or the next that the layout can cut into microbatches."""
    size, unit = config.train.global_batch_size, config.batch_unit
    least = -(-size // unit)
    for number in range(least, least + 4 * config.mesh.pp * config.pipeline.stages_per_rank + 1):
        if rules.allows_pipeline(with_keys(config, {"train.global_batch_size": number * unit})):
            return number * unit
    return size  # and the rules say why


def require_possible(config: Config, ranks: Sequence[int]) -> None:
    """Refuse what cannot be rehearsed, by its name.

    Args:
        config: Config of the run.
        ranks: Global ranks that `--rank` names.

    Raises:
        ConfigError: With the reason.
    """
    require_unstarted("hp dry-run")
    if config.train.compile != "none":
        raise ConfigError(
            f"train.compile ({config.train.compile}) must be none for hp dry-run: what a compiler "
            "makes of a model is not known before it has run"
        )
    if config.data.packing == "planned":
        raise ConfigError(
            'data.packing ("planned") must be stream or best_fit for hp dry-run: what is rehearsed '
            "stands for every step, but each of these has its own shapes; hp step-plan prices them"
        )
    if config.launch.device == "cpu" or config.launch.backend == "gloo":
        raise ConfigError(
            f"launch.device ({config.launch.device}) and launch.backend ({config.launch.backend}) "
            "must be auto, cuda or nccl: hp dry-run is of GPUs"
        )
    if wrong := [rank for rank in ranks if rank >= config.world_size]:
        raise ConfigError(
            f"--rank ({wrong[0]}) must be below the number of ranks ({config.world_size})"
        )


def dry_config(config: Config, *, gpus_per_node: int = 8) -> Config:
    """Return the config as ranks are given it: they share few cores, so that nothing is late.

    `mesh.gather` is decided as a run on such devices decides it: what tells how long their kernels
    take is a dry device as well, and a process is in one at a time.

    Args:
        config: Config of the run.
        gpus_per_node: Devices of a machine.
    """
    from hp_dry import Gpu  # noqa: PLC0415 - imports torch

    launch = replace(
        config.launch,
        num_processes=0,
        threads_per_process=1,
        device="cuda",
        init_timeout_seconds=_PATIENCE,
        step_timeout_seconds=_PATIENCE,
        hang_seconds=_PATIENCE,
    )
    config = replace(config, launch=launch, run=replace(config.run, resume="", init_from=""))
    gpu, local = Gpu(), min(gpus_per_node, config.world_size)
    machine = machine_found(gpu.name, memory=gpu.memory_bytes, node_size=local)
    return decided(config, machine, vocab_size=known_vocab_size(config))


def write_data(
    config: Config,
    folder: Path,
    *,
    documents: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Path:
    """Make the tokens: of text that the config names, else made up.

    Args:
        config: Config of the run.
        folder: Empty folder for the tokens.
        documents: Documents in each sequence that is made up; None: one for 1024 tokens.
        lengths: Tokens of these documents; None: in the ratio of 1, 1/2, 1/3 and so on.

    Returns:
        The folder with the tokens.
    """
    from hp_data import load_tokenizer  # noqa: PLC0415 - imports numpy
    from hp_data.preparation import prepare  # noqa: PLC0415 - likewise
    from hp_train.dry_run.made_up import (  # noqa: PLC0415 - likewise
        count_documents,
        document_lengths,
        write_tokens,
    )

    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.separator)
    if data.paths:
        made = folder / "data"
        prepare(
            made,
            paths=data.paths,
            field=data.field,
            tokenizer=tokenizer,
            eval_fraction=data.eval_fraction,
        )
        return made
    separate = data.documents == "separate"
    number = (documents or count_documents(data.seq_len)) if separate else 1
    write_tokens(folder, tokenizer, lengths or document_lengths(data.seq_len, number))
    return folder
