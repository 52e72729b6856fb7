"""Configs that the rules accept, drawn so that many of them stand at the edge of a rule.

A drawn config has all keys at some value of `DOMAINS`. It stands at the edge of a rule if changing
one of its keys to a neighbouring value breaks that rule and no other: one more of a number, or
another one of a few choices. Without torch.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from hp_trainer.config import Config, rules
from hp_trainer.config.options import with_keys
from hp_trainer.config.schema import Field, by_section, fields
from integration_tests.reliability.rule_names import broken_rules, every_rule

Values = dict[str, Any]
Value = tuple[str, Any]
"""A key, and one of its values."""

_OFTEN = 30
"""How much seldomer a value is drawn that costs much."""

DOMAINS: Mapping[str, Sequence[Any]] = {
    "run.seed": (0, 1, 2**63 - 1),
    "launch.num_processes": (0,),
    "launch.device": ("auto", "cpu"),
    "launch.backend": ("auto", "gloo"),
    "launch.step_timeout_seconds": (0.0, 100.0),
    "launch.max_restarts": (0, 3),
    "mesh.pp": (1, 1, 2, 3, 4),
    "mesh.dp_replicate": (1, 1, 2, 3, 4),
    "mesh.dp_shard": (1, 1, 2, 3, 4),
    "mesh.cp": (1, 1, 2, 3, 4),
    "mesh.tp": (1, 1, 2, 3, 4),
    "mesh.ep": (1, 1, 2, 3, 4),
    "mesh.etp": (1, 1, 2, 4),
    "mesh.ep_buffer": (0.0, 0.0, 1.0, 2.5),
    "mesh.stage_tp": ((), (), (1, 2), (2, 1), (1, 1), (1, 2, 1), (2,)),
    "mesh.stage_ep": ((), (), (1, 2), (2, 1), (1, 1)),
    "mesh.cp_heads": (0, 0, 1, 2, 3),
    "mesh.cp_ring": (False, True),
    "mesh.cp_deal": (False, True),
    "mesh.gather": fields()["mesh.gather"].choices,
    "mesh.reduce_once": (False, True),
    "pipeline.schedule": fields()["pipeline.schedule"].choices,
    "pipeline.stages_per_rank": (1, 1, 2, 3),
    "pipeline.stage_layers": ((), (), (1, 3), (3, 1), (2, 1, 1), (1, 1, 1, 2), (4,)),
    "pipeline.overlap": (False, True),
    "pipeline.retention": fields()["pipeline.retention"].choices,
    "pipeline.keep_microbatches": (1, 2, 3),
    "model.vocab_size": (0, 0, 261, 300),
    "model.max_positions": (0, 8, 12, 16, 24, 64),
    "model.dim": (8, 16, 24, 32, 20),
    "model.num_layers": (1, 2, 2, 3, 4, 6),
    "model.attention": ("gqa", "gqa", "mla"),
    "model.num_heads": (1, 2, 3, 4, 6, 8),
    "model.num_kv_heads": (1, 2, 3, 4),
    "model.head_dim": (0, 2, 4, 6, 8),
    "model.q_lora_rank": (0, 1, 5, 8),
    "model.kv_lora_rank": (1, 5, 8),
    "model.nope_head_dim": (1, 3, 4),
    "model.rope_head_dim": (2, 4, 6),
    "model.v_head_dim": (1, 3, 4),
    "model.qk_norm": (False, True),
    "model.attention_bias": (False, True),
    "model.attention_sinks": (False, True),
    "model.sliding_window": (0, 1, 3, 8, 100),
    "model.full_attention_every": (0, 1, 2, 5),
    "model.num_dense_layers": (0, 0, 1, 2, 4),
    "model.dense_hidden": (1, 5, 8, 12, 24),
    "model.expert_hidden": (1, 4, 6, 8, 12),
    "model.num_experts": (0, 1, 2, 3, 4, 6, 8, 12),
    "model.top_k": (1, 2, 3, 4),
    "model.num_shared_experts": (0, 1, 2),
    "model.expert_activation": ("swiglu", "clamped_swiglu"),
    "model.swiglu_limit": (0.5, 7.0),
    "model.swiglu_alpha": (1.0, 1.702),
    "model.expert_bias": (False, True),
    "model.router_score": ("softmax", "sigmoid"),
    "model.router_normalize": (False, True),
    "model.router_scale": (1.0, 2.5),
    "model.router_bias": (False, True),
    "model.num_expert_groups": (1, 1, 2, 3, 4),
    "model.num_limited_groups": (1, 1, 2, 3),
    "model.correction_bias": (False, True),
    "model.correction_rate": (0.0, 0.001),
    "model.balance_coefficient": (0.0, 0.01),
    "model.num_mtp_modules": (0, 0, 1, 2),
    "model.mtp_weight": (0.0, 0.3),
    "model.rope_theta": (100.0, 10000.0),
    "model.rope_pairs": ("halves", "neighbours"),
    "model.rope_scaling": ("none", "llama3", "yarn"),
    "model.rope_factor": (1.0, 4.0),
    "model.rope_original_positions": (1, 8, 8192),
    "model.rope_low_factor": (1.0, 3.9),
    "model.rope_high_factor": (4.0, 1.1),
    "model.rope_beta_fast": (32.0, 1.5),
    "model.rope_beta_slow": (1.0, 31.0),
    "model.rope_truncate": (True, False),
    "model.rope_mscale": (0.0, 1.0),
    "model.rope_mscale_all_dim": (0.0, 1.0),
    "model.norm_eps": (1e-5, 1e-3),
    "model.dropout": (0.0, 0.1),
    "model.init_std": (0.02, 0.1),
    "model.tie_embeddings": (False, True),
    "data.seq_len": (1, 2, 3, 4, 6, 8, 12, 16, 24),
    "data.documents": ("separate", "separate", "joined"),
    "data.packing": (*("stream",) * 3, *("best_fit",) * 3, "planned"),
    "data.plan_tokens": (0, 0, 8, 12, 16, 24, 64),
    "data.eval_fraction": (0.2, 0.02),
    "data.cache_gib": (0,),
    "train.steps": (1,),
    "train.global_batch_size": (1, 2, 2, 3, 4, 6, 8),
    "train.microbatch_size": (1, 1, 2, 3, 4),
    "train.dtype": ("float32", "float32", "bfloat16", "float64"),
    "train.recompute": fields()["train.recompute"].choices,
    "train.compile": (*("none",) * 2 * _OFTEN, "aot_eager"),
    "train.learning_rate": (0.0, 3e-3),
    "train.min_learning_rate_ratio": (0.0, 0.1, 1.0),
    "train.warmup_steps": (0, 1, 10),
    "train.weight_decay": (0.0, 0.1),
    "train.beta1": (0.0, 0.9),
    "train.beta2": (0.0, 0.95),
    "train.adam_eps": (1e-8, 1e-3),
    "train.max_grad_norm": (0.0, 0.01, 1.0),
    "train.not_finite": ("stop", "skip"),
    "train.max_skipped_steps": (1, 10),
    "train.log_every": (1, 10),
    "train.eval_every": (0, 1, 50),
    "train.eval_batches": (1, 2),
    "train.save_every": (0, 1, 2, 3),
    "train.async_save": (False, True),
    "train.keep_checkpoints": (1, 2),
    "train.keep_every": (0, 0, 1, 2, 6),
    "train.collect_every": (0, 1, 100),
    "train.profile": (*((),) * 2 * _OFTEN, (1,), (2, 3)),
    "train.profile_ranks": ((), (), (0,), (1,)),
    "train.sample_tokens": (0, 0, 0, 1),
    "train.sample_prompt": ("def ", "x", ""),
}
"""Small values of all keys that a config may have without files of its own, the most usual ones
more than once. What costs much is seldom."""

NOT_DRAWN: Mapping[str, str] = {
    "run.output_dir": "a folder",
    "run.name": "a folder",
    "run.resume": "a folder",
    "run.init_from": "a folder",
    "run.tensorboard": "an extra package",
    "launch.threads_per_process": "what a run costs",
    "launch.init_timeout_seconds": "how long a run waits",
    "launch.hang_seconds": "how long a run waits",
    "launch.stop_grace_seconds": "how long a run waits",
    "model.factory": "a file of code",
    "model.transformers": "a folder",
    "model.trust_remote_code": "a file of code",
    "data.paths": "files",
    "data.field": "files",
    "train.optimizer": "Muon has layouts of its own, those of test_muon_layouts.py",
    "data.tokenizer": "a file",
    "data.separator": "a file",
    "data.plan_costs": "a file",
}
"""Keys that stay as they are, and what they are about."""

_START: Values = {
    "mesh.gather": "stage",
    "pipeline.schedule": "gpipe",
    "model.dim": 16,
    "model.num_layers": 4,
    "model.expert_hidden": 8,
    "model.dense_hidden": 24,
    "model.num_experts": 4,
    "model.kv_lora_rank": 8,
    "model.nope_head_dim": 4,
    "model.rope_head_dim": 4,
    "model.v_head_dim": 4,
    "data.seq_len": 12,
    "data.eval_fraction": 0.2,
    "data.cache_gib": 0,
    "train.steps": 1,
    "train.global_batch_size": 4,
    "train.microbatch_size": 1,
    "train.warmup_steps": 1,
    "train.sample_tokens": 0,
    "launch.threads_per_process": 1,
    "launch.hang_seconds": 300.0,
}
_RANKS = (1, 2, 2, 2, 2, 2, 3, 4, 4)
_RESTARTS = 0.2
"""Share of configs that are not drawn from the one before them."""
_SECTIONS = {
    "mesh.": 5,
    "pipeline.": 3,
    "model.": 5,
    "data.": 2,
    "train.": 3,
    "run.": 0.2,
    "launch.": 0.2,
}
"""How often keys of each are changed."""
_COMPARED = 60
"""Values of which the one that was drawn the least is wanted."""
_REPAIRS = 60
"""Keys that are drawn again for one that is wanted to have a value."""
_MOVES = 150
"""Changes that are tried between two configs that are taken."""
_TRIES = 6
"""Configs that are looked at for one at the edge of a rule that was met seldom."""


@dataclass(frozen=True)
class Edge:
    """A neighbouring value that breaks one rule.

    Attributes:
        rule: Its name.
        key: Key that is changed.
        value: The neighbouring value.
    """

    rule: str
    key: str
    value: Any


@dataclass(frozen=True)
class Drawn:
    """A config that the rules accept.

    Attributes:
        config: The config.
        edge: The edge for which it was taken; None: for none.
        rules: All rules at whose edge it stands.
    """

    config: Config
    edge: Edge | None
    rules: frozenset[str] = field(default_factory=frozenset)


def draw(count: int, *, seed: int | str, largest: int = 4) -> Iterator[Drawn]:
    """Draw configs, three of four at the edge of the rule that was met the least so far.

    Each is drawn for a value of a key that was drawn the least so far, too.

    Args:
        count: How many.
        seed: Decides them; the same seed with a larger count gives the same ones first.
        largest: Ranks that a config may have.
    """
    random = Random(seed)
    seen: Counter[str] = Counter(dict.fromkeys(every_rule(), 0))
    values: Counter[Value] = Counter(
        dict.fromkeys(((key, value) for key in DOMAINS for value in DOMAINS[key]), 0)
    )
    start = current = with_keys(Config(), _START)
    for number in range(count):
        wants_edge = number % 4 > 0
        best: tuple[int, Config, list[Edge]] | None = None
        for _ in range(_TRIES if wants_edge else 1):
            # Some values forbid so much that few changes lead away from them.
            begin = start if random.random() < _RESTARTS else current
            ranks = min(random.choice(_RANKS), largest)
            current = _walk(begin, random, ranks=ranks, wanted=_seldom(values, random))
            found = edges(current) if wants_edge else []
            least = min((seen[edge.rule] for edge in found), default=len(seen) + count)
            if best is None or least < best[0]:
                best = least, current, found
            if least <= number // len(seen):
                break
        assert best is not None
        least, current, found = best
        edge = random.choice([e for e in found if seen[e.rule] == least]) if found else None
        if edge is not None:
            seen[edge.rule] += 1
        values.update((key, value_of(current, key)) for key in DOMAINS)
        yield Drawn(current, edge, frozenset(each.rule for each in found))


def _seldom(values: Counter[Value], random: Random) -> Value:
    """A value that was seldom drawn; what costs much is left to chance."""
    some = random.sample([*values], _COMPARED)
    cheap = [value for value in some if value[0] not in ("train.compile", "train.profile")]
    return min(cheap, key=values.__getitem__)


def _walk(config: Config, random: Random, *, ranks: int, wanted: Value) -> Config:
    """Change one to three keys at a time, many times, and never what the rules refuse.

    Args:
        config: Where to begin.
        random: Decides the changes.
        ranks: Ranks that there may come to be.
        wanted: A key and the value that it is to have, and is not to lose again.
    """
    found = _repaired(with_keys(config, dict([wanted])), random, ranks=ranks, wanted=wanted[0])
    has_wanted, config = found is not None, found or config
    for _ in range(_MOVES):
        change = {}
        # Keys of the same section belong together more often than others.
        sections = random.choices([*_SECTIONS], [*_SECTIONS.values()], k=2)
        for section in sections[: 1 + (random.random() < 0.3)]:
            of_section = [key for key in DOMAINS if key.startswith(section)]
            for key in random.choices(of_section, k=random.choice((1, 1, 2))):
                change[key] = random.choice(DOMAINS[key])
        if has_wanted:
            change[wanted[0]] = wanted[1]
        moved = with_keys(config, change)
        if moved.world_size > max(ranks, config.world_size) or moved.world_size > _most(moved):
            continue
        if moved.world_size == 1 < min(ranks, config.world_size):
            continue
        if next(rules.broken(moved), None) is None:
            config = moved
    return config


def _repaired(config: Config, random: Random, *, ranks: int, wanted: str) -> Config | None:
    """Draw keys again that a broken rule names, but for a wanted one, until no rule is broken."""
    for _ in range(_REPAIRS):
        problem = next(rules.broken(config), None)
        if problem is None and config.world_size > min(ranks, _most(config)):
            problem = "mesh.pp mesh.dp_replicate mesh.dp_shard mesh.cp mesh.tp mesh.stage_tp"
        if problem is None:
            return config
        named = [key for key in re.findall(r"[a-z]+\.[a-z_]+", problem) if key in DOMAINS]
        if others := [key for key in named if key != wanted]:
            key = random.choice(others)
            config = with_keys(config, {key: random.choice(DOMAINS[key])})
    return None


def _most(config: Config) -> int:
    # Graphs and traces of many ranks cost more than all else.
    return 2 if config.train.compile != "none" or config.train.profile else 8


def edges(config: Config) -> list[Edge]:
    """All neighbours of a config that break one rule and no other."""
    found = []
    for key in DOMAINS:
        for value in _neighbours(config, key):
            broken = broken_rules(with_keys(config, {key: value}))
            if len(broken) == 1 or broken[1:] == ["?"]:
                found.append(Edge(broken[0], key, value))
    return found


def _neighbours(config: Config, key: str) -> Iterator[Any]:
    """Values that are next to that of a key: one more and one less, or all other choices."""
    section, _, name = key.partition(".")
    value, about = getattr(getattr(config, section), name), fields()[key]
    if about.base is bool:
        yield not value
    elif about.choices:
        yield from (choice for choice in about.choices if choice not in (value, "inductor"))
    elif about.base is int:
        near = {"launch.num_processes": (config.world_size + 1,)}.get(key, (value - 1, value + 1))
        yield from (each for each in near if _in_bounds(about, each))
    elif about.base is float:
        others = {*DOMAINS[key], value / 2, value * 2, 0.5, 0.0}
        yield from (each for each in sorted(others - {value}) if _in_bounds(about, each))
    elif about.is_list:
        yield from _lists_near(config, value)
        yield from (each for each in DOMAINS[key] if each != value)
    else:
        yield from (each for each in DOMAINS[key] if each != value)


def _lists_near(config: Config, value: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield (*value, max(value, default=config.world_size))
    if value:
        yield value[:-1]
        yield (*value[:-1], value[-1] + 1)


def _in_bounds(about: Field, value: Any) -> bool:
    try:
        msgspec.convert(value, about.annotation)
    except msgspec.ValidationError:
        return False
    return True


def neighbour(drawn: Drawn) -> Config:
    """The config next to a drawn one that breaks its rule."""
    assert drawn.edge is not None
    return with_keys(drawn.config, {drawn.edge.key: drawn.edge.value})


def keys_that_differ(config: Config) -> Values:
    """Keys of a config with other values than the config that all drawing begins with."""
    start = with_keys(Config(), _START)
    return {
        key: value for key in fields() if (value := value_of(config, key)) != value_of(start, key)
    }


def value_of(config: Config, key: str) -> Any:
    """The value of a key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def config_of(values: Mapping[str, Any]) -> Config:
    """The config that all drawing begins with, with some keys replaced."""
    whole = {key: value_of(with_keys(Config(), _START), key) for key in fields()} | dict(values)
    return msgspec.convert(by_section(whole), Config)


def smaller(config: Config, fails: Callable[[Config], bool], *, tries: int = 40) -> Config:
    """Set keys back to those that all drawing begins with, as long as the config still fails.

    Args:
        config: A config that the rules accept, and that fails.
        fails: Asked of configs that the rules accept.
        tries: How often it is asked.
    """
    left = [*keys_that_differ(config)]
    size = len(left)
    while size and tries:
        size = min(-(-size // 2), len(left))
        for first in range(0, len(left), size):
            some = left[first : first + size]
            less = config_of({k: v for k, v in keys_that_differ(config).items() if k not in some})
            if tries and some and next(rules.broken(less), None) is None:
                tries -= 1
                config = less if fails(less) else config
        left = [*keys_that_differ(config)]
        size = 0 if size == 1 else size
    return config
