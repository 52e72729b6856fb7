"""The command ``hp plan``."""

import argparse
import gc
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hp_base.command_line import require_files, say, write_named
from hp_base.data_sheets import SHEETS
from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_base.numbers import real, whole
from hp_plan.costs.machine import MACHINES, Machine
from hp_plan.costs.modules import model_flops
from hp_plan.costs.routing import busiest_load, parse_skew
from hp_plan.layouts.choose import Choice, choose
from hp_plan.layouts.report import as_dict, batch, details, name, reasons, table
from hp_plan.layouts.written import as_flags, as_toml, require_other_file, start_command
from hp_plan.price.estimate import Estimate, Plan, estimate
from hp_plan.price.traffic import Spread
from hp_schedule import SearchResult, search
from hp_trainer.config import Config, PipelineConfig
from hp_trainer.config.options import Resolved
from hp_trainer.layout.schedules import KINDS
from hp_trainer.plugins import plugin

SUMMARY = "compare layouts by memory and time, without running them"
"""What the command does, for `hp --help`."""
_RATES = {
    "flops": "operations per second of a matrix product",
    "memory": "bytes of a device",
    "memory-bandwidth": "bytes per second of that memory",
    "layer-seconds": "seconds of a layer however small its input",
    "launch-seconds": "seconds of the host for a kernel; 0: layers are not priced by kernels",
    "grouped-flops": "as --flops, of products of experts; 0: the same",
    "attention-flops": "as --flops, of attention; 0: the same",
    "compiled": "share of kernels that are no products that train.compile leaves",
    "bandwidth": "bytes per second within a node",
    "latency": "seconds of a message within a node",
    "node-size": "devices of a node",
    "node-bandwidth": "bytes per second of a device to other nodes",
    "node-latency": "seconds of a message to another node",
    "cores": "devices that compute at the same time; 0: all",
    "context-memory": "bytes of a device that are taken before the first tensor",
    "communicator-memory": "bytes of a rank's end of a communicator",
    "peer-memory": "bytes more for each rank that it sends to one by one",
    "fragmentation": "bytes that the allocator reserves beside tensors, as a share of theirs",
}
_COUNTS = {"node-size": 1, "cores": 0}
"""What is counted, and the least of it."""
_BYTE_VOCABULARY = 256
_MOST_DEVICES = 2**20
_MOST_SECONDS = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--gpus",
        type=whole("--gpus", least=1, largest=_MOST_DEVICES),
        metavar="N",
        help="devices to use (default: those of the mesh)",
    )
    parser.add_argument(
        "--machine",
        default="h100",
        metavar="NAME",
        help=f"its rates: {', '.join(MACHINES)}, or a TOML file (default: h100)",
    )
    for rate, meaning in _RATES.items():
        flag = f"--{rate}"
        read = whole(flag, least=_COUNTS[rate]) if rate in _COUNTS else real(flag)
        parser.add_argument(flag, type=read, metavar="X", help=meaning)
    parser.add_argument(
        "--measure", action="store_true", help="measure the rates with this model on this machine"
    )
    parser.add_argument(
        "--top", type=whole("--top", least=1), default=5, help="layouts to show (default: 5)"
    )
    parser.add_argument(
        "--search",
        type=real("--search", below=_MOST_SECONDS),
        metavar="SECONDS",
        help="look for a schedule that is faster than the best one that has a name",
    )
    parser.add_argument(
        "--vocab-size",
        type=whole("--vocab-size", least=1),
        help="tokens (default: of the tokenizer)",
    )
    parser.add_argument(
        "--skew",
        default="uniform",
        metavar="HOW",
        help="what experts get: uniform, gini=0.4, or a JSON file of shares (default: uniform)",
    )
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="price steps of documents of many lengths: a file, or a distribution's name",
    )
    parser.add_argument(
        "--batches",
        type=whole("--batches", least=1),
        default=50,
        metavar="N",
        help="batches that are drawn or read for --lengths, at most (default: 50)",
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the config with the best layout to a .toml file"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(resolved: Resolved, options: argparse.Namespace) -> int:
    """Plan a config.

    Args:
        resolved: The config.
        options: Parsed options of `add_arguments`.

    Returns:
        0.

    Raises:
        ConfigError: When no layout is allowed or fits.
    """
    config = resolved.config
    if config.data.packing == "planned":
        raise ConfigError(
            'data.packing ("planned") must be stream or best_fit: layouts are priced by sequences '
            "of one length; with best_fit, --lengths prices planned steps, as hp step-plan does"
        )
    if options.write:
        require_other_file(options.write, options.config)
        require_files(options, "write")
    vocab_size = options.vocab_size or known_vocab_size(config)
    machine = _machine(config, options)
    num_devices = config.world_size if options.gpus is None else options.gpus
    spread = _spread(config, num_devices, options.skew)
    with _without_collector():
        choice = choose(
            config, num_devices, machine, vocab_size=vocab_size, count=options.top, spread=spread
        )
    configured = None
    if config.world_size == num_devices:
        configured = estimate(config, machine, vocab_size=vocab_size, spread=spread)
    found = None
    if options.search is not None:
        plan = Plan(choice.best[0].config, machine, vocab_size=vocab_size, spread=spread)
        found = _search(plan, choice.best[0], asked=config.pipeline, seconds=options.search)
    best, words = choice.best[0], [options.write]
    if not options.write:
        given = dict(options.overrides)
        words = as_flags(resolved, best, source=options.config, given=given)
    command = start_command(words, best, node_size=machine.node_size)
    result = {**_as_dict(choice, configured, found), "command": command}
    reached = None
    if (sheet := SHEETS.get(options.machine)) and config.train.dtype == "bfloat16":
        needed = model_flops(config, vocab_size=vocab_size) * best.tokens_per_second
        reached = needed / (sheet.teraflops * 1e12 * num_devices)
    lines = _lines(choice, configured, found, machine, reached=reached)
    if options.lengths:
        by_lengths = lengths_plugin(options.lengths)
        priced = configured or choice.best[0]
        steps = by_lengths.steps_of(
            priced.config,
            machine,
            vocab_size=vocab_size,
            source=options.lengths,
            number=options.batches,
        )
        result["lengths"] = by_lengths.steps_as_dict(steps)
        head = f"{len(steps[0].seconds)} steps of {options.lengths}, {name(priced)}:"
        lines += ["", head, *by_lengths.table_of(steps)]
    if options.write:
        write_named("--write", options.write, as_toml(resolved, best))
    each = "" if command.startswith("hp ") else ", on each node"
    wrote = f"wrote {options.write}; " if options.write else ""
    lines += ["", f"{wrote}to run it{each}: {command}"]
    say(json.dumps(result) if options.json else "\n".join(lines))
    return 0


def lengths_plugin(asked: str) -> ModuleType:
    """Load the module of hp-packing that prices steps of documents of many lengths.

    Args:
        asked: Value of the option, for the message.

    Raises:
        ConfigError: When hp-packing is not installed.
    """
    asked_by = f"--lengths ({asked})"
    module: ModuleType = plugin("hp_plan.lengths", "steps", asked_by=asked_by, package="hp-packing")
    return module


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch off the garbage collector, which takes a quarter of a search and frees little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lines(
    choice: Choice,
    configured: Estimate | None,
    found: SearchResult | None,
    machine: Machine,
    *,
    reached: float | None,
) -> list[str]:
    best = choice.best[0]
    lines = [*table(choice.best), "", batch(best, reached=reached), *details(best)]
    lines += ["", *reasons(choice, machine)]
    if configured is not None:
        lines += ["", "as configured:", *table([configured])[1:], *details(configured)]
    if found is not None:
        plain = choice.best[0].parts
        before = plain["compute"] + plain["idle"] + plain["exchanges"]
        lines += [
            "",
            (
                f"searched schedule, {found.num_stages_per_rank} stages per rank, from "
                f"{found.origin}: {found.makespan / before - 1:+.1%} of the pipeline's time; no "
                f"schedule of these stages takes less than {found.lower_bound / before - 1:+.1%}"
            ),
        ]
    return lines


def _as_dict(
    choice: Choice, configured: Estimate | None, found: SearchResult | None
) -> dict[str, object]:
    result: dict[str, object] = {
        "best": [as_dict(estimate) for estimate in choice.best],
        "meshes": choice.num_meshes,
        "priced": choice.num_priced,
        "simulated": choice.num_simulated,
        "complete": choice.is_complete,
    }
    if configured is not None:
        result["configured"] = as_dict(configured)
    if found is not None:
        result["search"] = {
            "seconds": found.makespan,
            "lower_bound_seconds": found.lower_bound,
            "origin": found.origin,
        }
    return result


def _machine(config: Config, options: argparse.Namespace) -> Machine:
    machine = known_machine(options.machine)
    if options.measure:
        require_unstarted("--measure")
        from hp_plan.layouts.measure import measure  # noqa: PLC0415 - imports torch

        machine, flags = measure(config)
        sys.stderr.write(f"measured: {flags}\n")
    given = {rate.replace("-", "_"): getattr(options, rate.replace("-", "_")) for rate in _RATES}
    try:
        return machine.with_values(**given)
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from None


def known_machine(name: str) -> Machine:
    """Return a machine by its name, or read a file with the name of one and values that differ."""
    if name in MACHINES:
        return MACHINES[name]
    if not name.endswith(".toml"):
        known = ", ".join(MACHINES)
        raise ConfigError(f'--machine ("{name}") must be one of {known}, or a TOML file')
    try:
        values = tomllib.loads(read_named(Path(name)).decode())
        like = values.pop("like", "h100")
        return MACHINES[like].with_values(**values)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = f"{type(error).__name__}: {why_not(error)}"
        raise ConfigError(f'--machine ("{name}") must be a file of a machine: {why}') from None


def known_vocab_size(config: Config) -> int:
    """Return the rows of the embedding: of the config, or of its tokenizer."""
    if config.model.vocab_size:
        return config.model.vocab_size
    if not config.data.tokenizer:
        return _BYTE_VOCABULARY
    from hp_data import load_tokenizer  # noqa: PLC0415 - imports numpy

    return load_tokenizer(config.data.tokenizer, config.data.separator).vocab_size


def _spread(config: Config, num_devices: int, skew: str) -> Spread:
    """Return the load of the busiest rank, for all numbers of ranks that may share the experts."""
    given, model = parse_skew(skew, config.model), config.model
    if skew == "uniform":
        return Spread()
    most = min(num_devices, model.num_experts)
    ranks = [n for n in range(2, most + 1) if num_devices % n == model.num_experts % n == 0]
    return Spread(loads=tuple((ep, busiest_load(given, model, ep)) for ep in ranks))


def _search(
    plan: Plan, best: Estimate, *, asked: PipelineConfig, seconds: float
) -> SearchResult | None:
    """Search a schedule for the stages of a layout, with the retention that the config asks for."""
    config, machine = best.config, plan.machine
    if config.mesh.pp == 1 or KINDS[config.pipeline.schedule].returns:
        return None  # nothing to order, or a chain that the search does not know
    room = (machine.memory - best.memory.total) / (1 + machine.fragmentation)
    return search(
        plan.costs(plan.schedule()),
        num_ranks=config.mesh.pp,
        num_microbatches=plan.num_microbatches,
        virtual=(config.pipeline.stages_per_rank,),
        memory_limit=room + best.memory.activations,
        retention=() if asked.retention == "keep" else (asked.retention,),
        time_budget=seconds,
    )
