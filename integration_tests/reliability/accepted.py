"""Configs against the code: what rules accept must start, what they refuse must not be right.

    python -m integration_tests.reliability.accepted --count 2000 --minutes 60

goes on where it was stopped. Every accepted config is started for one step. Of every rule, some
configs that it alone refuses are started all the same: they must fail, or come to other numbers
than one process. A rule that says what is meant, and not what can be computed, is in `POLICY`.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_base.command_line import say
from hp_trainer.config import Config
from hp_trainer.config.options import one_process, with_keys
from integration_tests.reliability.drawn import (
    Drawn,
    Edge,
    Values,
    config_of,
    draw,
    keys_that_differ,
    neighbour,
    smaller,
)
from integration_tests.reliability.rule_names import broken_rules, every_rule
from integration_tests.reliability.started import Started, start_all
from integration_tests.runs import write_corpus

CHUNK = 100
"""Configs that are drawn at once."""
_AT_ONCE = 20
"""Configs that one set of ranks takes after each other."""
_CLOSE = 1e-5

_NO_EFFECT = "it would be without effect"
_MEANT = "it can be computed, and is hardly what is meant"

_WITHOUT_EFFECT = (
    "planned_rules: data.{key}",
    "_expert_buffer: {must_be_off} mesh.ep (1)",
    "_attention: model.{key} (true)",
    "_attention: model.full_attention_every",
    "_rotary: model.rope_factor",
    "_deal: mesh.cp_deal (true)",
    "mesh_rules: mesh.gather",
    "_order_of_plan: pipeline.retention",
    "_order_of_plan: pipeline.overlap",
    "_layout_of_plan: mesh.cp_deal",
    "_profile_rules: train.profile_ranks",
    "saving_rules: train.keep_every",
    "overlap_rules: {must_be_off} mesh.ep (1)",
    "overlap_rules: {must_be_off} pipeline.schedule",
    "overlap_rules: {must_be_off} model.num_experts",
    "overlap_rules: {must_be_off} train.global_batch_size",
    "overlap_rules: {must_be_off} mesh.etp",
    "recompute_rules: train.compile",
)
_HARDLY_MEANT = (
    "stage_list_rules: mesh.{name}",
    "mesh_rules: {} must equal",
    "_context_ranks: mesh.cp_heads",
    "_rotary: model.rope_low_factor",
    "_rotary: model.rope_beta_slow",
    "_attention: model.dim",
    "_attention: model.num_kv_heads",
    "model_rules: data.seq_len",
    "model_rules: model.num_mtp_modules",
    "part_rules: model.num_dense_layers",
    "batch_rules: data.documents",
    "_deal: {} must be",
)
_OTHERWISE = {
    "_expert_buffer: mesh.ep_buffer": "every step would be run again, as rows do not fit",
    "_layout_of_plan: mesh.stage_tp": "its price and its proof are of equal stages",
    "retention_rules: pipeline.retention": "parameters would be copied away with what is kept",
    "overlap_rules: mesh.ep_buffer": "on a GPU nobody has seen a pair share the buffers",
    "_expert_ranks: {} must divide model.num_experts": "without experts there is nothing to divide",
    "_tensor_ranks": "what does not divide may be a width of layers that are not there",
    "_expert_ranks: mesh.etp": "without experts there is nothing to divide",
    "_expert_ranks: {} must divide or be a multiple": "nobody has priced experts whose copies lie "
    "across the replicas of dense layers",
    "_context_ranks: data.seq_len": "where unequal shares can be computed, ranks wait for others",
    "_context_ranks: {key} must divide model.num_heads": "where unequal heads can be computed, "
    "ranks wait for others",
    "_layout_of_plan: train.compile": "graphs would be compiled for each length of a microbatch",
    "gather_rules: {must_be} pipeline.overlap": "which of two threads comes first decides about it",
}


def _reasons(*tables: Mapping[str, str]) -> dict[str, str]:
    """Reasons by the names of rules, of which tables have the beginnings.

    Raises:
        LookupError: When no rule begins so: it was renamed, or is gone.
    """
    begins = [begin for table in tables for begin in table]
    lost = [begin for begin in begins if not any(rule.startswith(begin) for rule in every_rule())]
    if lost:
        raise LookupError(f"no rule begins with {lost}")
    return {
        rule: why
        for table in tables
        for begin, why in table.items()
        for rule in every_rule()
        if rule.startswith(begin)
    }


POLICY = _reasons(
    dict.fromkeys(_WITHOUT_EFFECT, _NO_EFFECT), dict.fromkeys(_HARDLY_MEANT, _MEANT), _OTHERWISE
)
"""Rules that refuse what can be computed, and why they do."""

NO_EDGE = _reasons(
    dict.fromkeys(("file_rules", "_model_files", "extra_rules"), "it is about files"),
    dict.fromkeys(
        ("_own", "overlap_rules: {must_be_off} {} and", "recompute_rules: train.recompute"),
        "it is about models of one's own, which are not drawn",
    ),
    dict.fromkeys(
        ("size_rules", "_profile_rules: train.{key} ({} of"), "it bounds what would take too long"
    ),
    {
        "mesh_rules: launch.num_processes": "it is about ranks that torchrun started",
        "_layout_of_plan: data.packing": "it is about models of one's own, which are not drawn",
        "_experts: model.top_k ({}) must be at most model.num_experts": "the rule of groups holds "
        "wherever it does, and this one says it better",
    },
)
"""Rules at whose edge no drawn config stands, and why."""


@dataclass(frozen=True)
class Kept:
    """What is known from earlier, in a folder of JSON lines.

    Attributes:
        folder: The folder.
    """

    folder: Path

    def drawn(self, chunk: int, seed: int) -> list[Drawn]:
        """Some of the configs to start, drawn once, that the rules still accept."""
        file = self.folder / f"drawn-{seed}-{chunk}.jsonl"
        if not file.exists():
            lines = []
            for each in draw(CHUNK, seed=f"{seed}/{chunk}"):
                edge = each.edge and [each.edge.rule, each.edge.key, each.edge.value]
                row = {"keys": keys_that_differ(each.config), "edge": edge}
                lines.append(json.dumps({**row, "rules": sorted(each.rules)}))
            file.write_text("\n".join(lines) + "\n")
        found = (_drawn(json.loads(line)) for line in file.read_text().splitlines())
        return [each for each in found if not broken_rules(each.config)]

    def results(self, name: str) -> dict[str, dict[str, Any]]:
        """Results by the keys of their configs."""
        file = self.folder / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {(row := json.loads(line))["keys"]: row for line in lines}

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep one result."""
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def _drawn(row: Mapping[str, Any]) -> Drawn:
    edge = None
    if row["edge"] is not None:
        rule, key, value = row["edge"]
        edge = Edge(rule, key, _as_value(value))
    return Drawn(config_of(_as_values(row["keys"])), edge, frozenset(row["rules"]))


def _as_values(keys: Values) -> Values:
    return {key: _as_value(value) for key, value in keys.items()}


def _as_value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def named(config: Config) -> str:
    """A config by its keys."""
    return json.dumps(keys_that_differ(config), sort_keys=True)


class OutOfTimeError(Exception):
    """The part of a session is over."""


def started(configs: Sequence[Config], name: str, kept: Kept, *, data: Path, until: float) -> None:
    """Start configs that were not yet, in batches of the same number of ranks.

    Raises:
        OutOfTimeError: When that time has come.
    """
    rows = kept.results(name)
    # What failed may have been mended.
    known = {key for key, row in rows.items() if not row["problem"] or name != "accepted"}
    missing = {key: each for each in configs if (key := named(each)) not in known}
    for batch in _batches([*missing.values()]):
        if time.monotonic() > until:
            raise OutOfTimeError
        with tempfile.TemporaryDirectory(prefix="accepted-") as folder:
            # What is refused fails as a rule, of which one answer is enough.
            answers = start_all(batch, Path(folder), data=data, confirms=name == "accepted")
            for config, result in zip(batch, answers, strict=True):
                kept.add(name, _row(config, result))
                if result.problem and name == "accepted":
                    say(f"FAILED {result.problem[:300]}\n    {named(config)}")
    say(f"{name}: {len(kept.results(name))} were started")


def _batches(configs: Sequence[Config]) -> Iterator[list[Config]]:
    sizes = defaultdict(list)
    for config in configs:
        sizes[config.world_size].append(config)
    for size in sorted(sizes):
        for first in range(0, len(sizes[size]), _AT_ONCE):
            yield sizes[size][first : first + _AT_ONCE]


def _row(config: Config, result: Started) -> dict[str, Any]:
    return {
        "keys": named(config),
        "ranks": config.world_size,
        "problem": result.problem,
        "numbers": result.numbers,
        "cpu_seconds": round(result.cpu_seconds, 2),
        "trace": result.trace,
    }


def main() -> int:
    """Start what was drawn.

    Returns:
        Exit status: 1 where an accepted config failed, or a rule refuses what is right.
    """
    parser = argparse.ArgumentParser(prog="accepted", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="configs that are drawn")
    parser.add_argument("--of-each", type=int, default=3, help="refused configs of each rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="of this part")
    parser.add_argument("--results", type=Path, default=Path(".nox/rules"))
    parser.add_argument("--shrink", action="store_true", help="make what fails small")
    parser.add_argument("--only", choices=["accepted", "refused"])
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    options.results.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.results)
    data = write_corpus(options.results)
    failed = False
    drawn: list[Drawn] = []
    try:
        for chunk in range(-(-options.count // CHUNK)):
            some = kept.drawn(chunk, options.seed)
            drawn += some
            if options.only != "refused":
                started([d.config for d in some], "accepted", kept, data=data, until=until)
        if options.only != "refused":
            failed |= _tell_accepted(drawn, kept.results("accepted"))
            for each in drawn if options.shrink else ():
                if problem := kept.results("accepted")[named(each.config)]["problem"]:
                    say(f"{problem[:200]}\n    {named(_smallest(each.config, data, until))}")
        if options.only != "accepted":
            chosen = _refused(drawn, options.of_each)
            started([each.config for each in chosen], "refused", kept, data=data, until=until)
            known = kept.results("refused")
            well = [each.config for each in chosen if not known[named(each.config)]["problem"]]
            started([*map(one_process, well)], "refused", kept, data=data, until=until)
            failed |= _tell_refused(chosen, kept.results("refused"))
    except OutOfTimeError:
        say("the time is up; the same command goes on")
    return int(failed)


def _smallest(config: Config, data: Path, until: float) -> Config:
    """A config of few keys that fails as well."""

    def fails(less: Config) -> bool:
        with tempfile.TemporaryDirectory(prefix="accepted-") as folder:
            [found] = start_all([less], Path(folder), data=data)
        return bool(found.problem) and time.monotonic() < until

    return smaller(config, fails)


def _tell_accepted(drawn: Sequence[Drawn], results: Mapping[str, dict[str, Any]]) -> bool:
    """Say what became of accepted configs; returns whether one failed."""
    rows = [results[named(each.config)] for each in drawn]
    failed = [row for row in rows if row["problem"]]
    seconds = sum(row["cpu_seconds"] for row in rows) / max(1, len(rows))
    say(
        f"{len(rows) - len(failed)} of {len(rows)} accepted configs start, {seconds:.1f} CPU s each"
    )
    for row in failed:
        say(f"FAILED {row['problem'][:300]}\n    {row['keys']}")
    at_edges = Counter(rule for each in drawn for rule in each.rules)
    for rule in every_rule():
        if not at_edges[rule]:
            say(f"no config at an edge of: {rule}: {NO_EDGE.get(rule, 'WHY?')}")
    return bool(failed)


@dataclass(frozen=True)
class Refused:
    """A config that breaks one rule.

    Attributes:
        rule: Name of the rule.
        config: The config.
    """

    rule: str
    config: Config


def _refused(drawn: Sequence[Drawn], of_each: int) -> list[Refused]:
    """Of every rule some configs that it alone refuses, by the change of different keys."""
    found: dict[str, list[Refused]] = defaultdict(list)
    keys: Counter[tuple[str, str]] = Counter()
    for each in drawn:
        if each.edge is None or len(found[each.edge.rule]) == of_each:
            continue
        config = neighbour(each)
        # More to compare, and by every digit, where that changes nothing about the rules.
        exact = with_keys(config, {"train.steps": 2, "train.dtype": "float64"})
        config = exact if broken_rules(exact) == broken_rules(config) else config
        key = each.edge.rule, each.edge.key
        if keys[key] < -(-of_each // 2):
            keys[key] += 1
            found[each.edge.rule].append(Refused(each.edge.rule, config))
    return [each for some in found.values() for each in some]


def _tell_refused(chosen: Sequence[Refused], results: Mapping[str, dict[str, Any]]) -> bool:
    """Say what became of refused configs; returns whether a rule refuses what is right."""
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for each in chosen:
        mine, one = results[named(each.config)], results.get(named(one_process(each.config)))
        told[each.rule][_verdict(mine, one)] += 1
    too_strict = False
    for rule, verdicts in told.items():
        is_wrong = verdicts["equal"] > 0 and rule not in POLICY
        too_strict |= is_wrong
        counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        say(f"{'TOO STRICT ' if is_wrong else ''}{rule}: {counts}; {POLICY.get(rule, '')}")
    return too_strict


def _verdict(mine: Mapping[str, Any], one: Mapping[str, Any] | None) -> str:
    if mine["problem"] or one is None:
        return "failed"
    if one["problem"]:
        return "started"
    return "equal" if _are_close(mine["numbers"], one["numbers"]) else "other numbers"


def _are_close(mine: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> bool:
    pairs = [
        (step[name], other[name]) for step, other in zip(mine, others, strict=True) for name in step
    ]
    return all(math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
