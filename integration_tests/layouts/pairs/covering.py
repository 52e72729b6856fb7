"""Models and layouts in which every pair of a feature of a model and a setting of a run comes up.

Keys, their bounds and their lists of values come from the schema, the values of layouts from
:data:`hp_plan.layouts.space.AXES`, and what goes together from the rules, so that a new key is
paired without being told. No torch.

A *feature* is a value of a key of the model, a *setting* a value of any other key that has an
effect on what is trained. A config has a pair if it has both and each does something in it: a width
of latent attention does nothing where attention is grouped (`ONLY_WITH`). A pair is refused if the
rules refuse every config that is found for it: from the config that has the pair and nothing else,
keys that a broken rule names are changed, one after the other, as long as that leads on.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from random import Random
from types import EllipsisType, MappingProxyType
from typing import Any, Final, NamedTuple

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_plan.layouts.space import AXES
from hp_train.verify.pairs import WITHOUT_EFFECT, is_one_of
from hp_trainer.config import Config, rules
from hp_trainer.config.options import with_keys
from hp_trainer.config.schema import Field, convert, fields

LEFT_OUT: Final = MappingProxyType(
    {
        WITHOUT_EFFECT: "has no effect on what is trained",
        "train.steps train.warmup_steps train.adam_eps train.dtype": "is what the comparison sets",
        "train.compile=inductor": "builds machine code: nox -s kernels",
    }
)
"""Keys, or values of one, that are in no pair, by kind, each with the reason."""
OF_FILES: Final = "names or says what is outside of the config"

SOME: Final = ...
"""Any value but what switches the key off."""
ONLY_WITH: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "model.trust_remote_code": {"model.transformers": SOME},
        "model.num_kv_heads model.head_dim model.qk_norm model.attention_bias "
        "model.attention_sinks": {"model.attention": "gqa"},
        "model.q_lora_rank model.kv_lora_rank model.nope_head_dim model.rope_head_dim "
        "model.v_head_dim": {"model.attention": "mla"},
        "model.full_attention_every": {"model.sliding_window": SOME},
        "model.dense_hidden": {"model.num_dense_layers": SOME},
        "model.expert_* model.top_k model.num_shared_experts model.router_* "
        "model.num_expert_groups model.correction_bias model.balance_coefficient": {
            "model.num_experts": SOME
        },
        "model.swiglu_*": {
            "model.num_experts": SOME,
            "model.expert_activation": "clamped_swiglu",
        },
        "model.num_limited_groups": {"model.num_experts": SOME, "model.num_expert_groups": SOME},
        "model.correction_rate": {"model.num_experts": SOME, "model.correction_bias": True},
        "model.mtp_weight": {"model.num_mtp_modules": SOME},
        "model.rope_scaling=llama3 model.rope_scaling=yarn": {"model.rope_factor": SOME},
        "model.rope_factor": {"model.rope_scaling": SOME},
        "model.rope_original_positions": {"model.rope_scaling": SOME, "model.rope_factor": SOME},
        "model.rope_low_factor model.rope_high_factor": {
            "model.rope_scaling": "llama3",
            "model.rope_factor": SOME,
        },
        "model.rope_beta_* model.rope_truncate model.rope_mscale*": {
            "model.rope_scaling": "yarn",
            "model.rope_factor": SOME,
        },
        "model.rope_mscale_all_dim": {"model.attention": "mla"},
        "mesh.cp_*": {"mesh.cp": SOME},
        "mesh.gather": {"mesh.dp_shard": SOME},
        "mesh.reduce_once": {"mesh.dp_shard": SOME, "mesh.gather": "block"},
        "mesh.ep mesh.etp mesh.stage_ep mesh.ep_buffer": {"model.num_experts": SOME},
        "pipeline.schedule pipeline.stages_per_rank": {"mesh.pp": SOME},
        "pipeline.keep_microbatches": {"pipeline.retention": SOME},
    }
)
"""What else a config must have for a key, or a value, to do anything; not what a rule wants."""

_NAMED = re.compile(r"\b(?:run|mesh|pipeline|model|data|train)\.\w+")
_DEPTH, _TRIES = 4, 1500
"""Keys that are changed for a pair, and configs that are looked at."""
_NEAR = 40
"""Configs that are looked at for one more value of a config that is there."""


class Setting(NamedTuple):
    """A value of a key."""

    key: str
    value: object

    @property
    def is_feature(self) -> bool:
        """Tell whether it is one of the model; see the top of this file."""
        return self.key.startswith("model.")

    @property
    def is_off(self) -> bool:
        """Tell whether nothing is asked for by it."""
        field = fields()[self.key]
        is_one = self.value == (field.default if field.section == "mesh" else _nothing(field))
        return not self.value or is_one or self.value in ("none", "keep")

    def __str__(self) -> str:
        """Return the override."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.key}={value if isinstance(value, str) else shown(value)}".replace(" ", "")


Pair = tuple[Setting, Setting]
"""A feature and a setting."""


@dataclass(frozen=True)
class Design:
    """Configs that have every pair that rules allow.

    Attributes:
        base: Config that they are changes of.
        configs: The configs.
        pairs: Every pair, with the index of the first config that has it, or with why none does.
        left_out: Keys and values that are in no pair, each with the reason.
    """

    base: Config
    configs: tuple[Config, ...]
    pairs: Mapping[Pair, int | str]
    left_out: Mapping[str, str]

    @cached_property
    def refused(self) -> Mapping[Pair, str]:
        """Return the pairs that no config has, and why."""
        return {pair: why for pair, why in self.pairs.items() if isinstance(why, str)}

    def lines(self) -> Iterator[str]:
        """Yield every pair with the overrides of its config, or the reason why no config has it."""
        named = [" ".join(map(str, changes(each, self.base))) for each in self.configs]
        for (feature, setting), found in self.pairs.items():
            what = f"refused: {found}" if isinstance(found, str) else named[found]
            yield f"{feature}\t{setting}\t{what}"
        for key, why in self.left_out.items():
            yield f"{key}\t\tleft out: {why}"

    def __str__(self) -> str:
        covered = len(self.pairs) - len(self.refused)
        features, settings = (len(set(each)) for each in zip(*self.pairs, strict=True))
        return (
            f"{len(self.pairs)} pairs of {features} features of the model and {settings} settings: "
            f"{covered} in {len(self.configs)} configs, {len(self.refused)} refused"
        )


def cost(config: Config) -> float:
    """Estimate seconds of one core that a comparison takes for each step and one process more.

    Measured: a rank takes 0.23 s, and 8 ms for each sequence and layer; ten times as much where its
    blocks are compiled. What ranks compute alike, and who has fewer layers, is not looked at.
    """
    layers = config.model.num_layers + config.model.num_mtp_modules
    each = 0.23 + 0.008 * config.train.global_batch_size * layers / 4
    return (1 + config.world_size) * each * (10 if config.train.compile != "none" else 1)


def changes(config: Config, base: Config) -> list[Setting]:
    """Return settings of a config that are not those of another one."""
    return [Setting(k, v) for k in fields() if (v := _value(config, k)) != _value(base, k)]


def cover(
    base: Config,
    *,
    num_processes: int,
    settings: Sequence[Setting] | None = None,
    seed: int = 0,
) -> Design:
    """Find configs that have every pair of a feature and a setting that the rules allow.

    The first pair that none has yet decides, and what goes with it is filled with as many other
    pairs that none has as one change after the other can add.

    Args:
        base: Allowed config, whose values are among those of every key.
        num_processes: Most processes of a config.
        settings: Settings to pair with features; None: all values of all other keys.
        seed: Seed of the order in which changes are tried.

    Raises:
        ConfigError: When a key has one value only and is not left out.
    """
    return _Covering(base, num_processes, settings, seed).design()


def values_of(base: Config, num_processes: int) -> tuple[dict[str, list[Setting]], dict[str, str]]:
    """Return values of each key that are paired, and what is left out, with the reason.

    Args:
        base: Its own value is the first.
        num_processes: Most processes of a config.
    """
    axes = {axis.key: axis for axis in AXES}
    found: dict[str, list[Setting]] = {}
    left_out: dict[str, str] = {}
    for key, field in fields().items():
        if why := _left_out(field):
            left_out[key] = why
            continue
        kept = _value(base, key)
        values = axes[key].choices if key in axes else _candidates(field, kept)
        those = [Setting(key, value) for value in dict.fromkeys((kept, *values))]
        for each in list(those):
            if why := _value_left_out(each, num_processes):
                left_out[str(each)] = why
                those.remove(each)
        found[key] = those
    return found, left_out


def _left_out(field: Field) -> str:
    for patterns, why in LEFT_OUT.items():
        if is_one_of(field.key, patterns):
            return why
    text = field.base is str or field.base == tuple[str, ...]
    if text and not field.choices:
        return OF_FILES
    needs = [needed for keys, needed in ONLY_WITH.items() if is_one_of(field.key, keys)]
    for key in chain.from_iterable(needs):
        if why := _left_out(fields()[key]):
            return f"{why}: only with {key}"
    return ""


def _value_left_out(setting: Setting, num_processes: int) -> str:
    sizes = setting.value if isinstance(setting.value, tuple) else (setting.value,)
    if setting.key in ("mesh.cp_heads", "mesh.ep_buffer"):
        sizes = ()
    if setting.key.startswith("mesh.") and sum(n for n in sizes if type(n) is int) > num_processes:
        return f"takes more than {num_processes} processes"
    return next((why for keys, why in LEFT_OUT.items() if str(setting) in keys.split()), "")


def _candidates(field: Field, kept: Any) -> Sequence[object]:
    """Return other values of a key: all of its list, else the nearest numbers, and 0 or none."""
    if field.choices or field.base is bool:
        return field.choices or (False, True)
    near: Sequence[Any]
    if field.base is int:
        near = (2 * kept, kept // 2, kept + 1, 1, 2, 4, 8, 16)
    else:
        near = (2 * kept, kept / 2, 0.5, 2.0)
    nothing = [] if (least := _nothing(field)) is None else [least]
    return [*nothing, *(value for value in near if value and _has_bounds(field, value))]


def _nothing(field: Field) -> object:
    """Return the number by which a key switches its feature off; None: it has none."""
    least = next((meta.ge for meta in field.metas if meta.ge is not None), None)
    return None if least is None or (least and field.base is int) else field.base(least)


def _has_bounds(field: Field, value: object) -> bool:
    try:
        convert(field, value, strict=True)
    except ConfigError:
        return False
    return True


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


class _Refusal(NamedTuple):
    """Why there is no config."""

    why: str


class _Covering:
    def __init__(
        self,
        base: Config,
        num_processes: int,
        settings: Sequence[Setting] | None,
        seed: int,
    ) -> None:
        self.base, self.num_processes = base, num_processes
        self.random = Random(seed)
        self.values, self.left_out = values_of(base, num_processes)
        for key in list(self.values):
            self.values[key] = list(self._reached(key))
            if len(self.values[key]) < 2 and not any(
                is_one_of(k, f"{key}=*") for k in self.left_out
            ):
                raise ConfigError(f"{key} must have a second value to be paired with, or none")
        everything = [each for those in self.values.values() for each in those]
        self.features = [each for each in everything if each.is_feature]
        others = [each for each in everything if not each.is_feature]
        self.settings = [each for each in others if settings is None or each in settings]
        self.place = {each: i for i, each in enumerate(self.settings)}
        self.order = [*self.features, *self.settings]

    def _reached(self, key: str) -> Iterator[Setting]:
        """Yield values of a key that some config has; of numbers, those nearest to the base's."""
        field = fields()[key]
        is_list = bool(field.choices) or field.base is bool or is_one_of(key, _KEYS_OF_AXES)
        has_other = False
        for each in self.values[key]:
            is_other = each.value not in (_value(self.base, key), _nothing(field))
            if has_other and is_other and not is_list:
                continue
            if isinstance(found := self._joined(self.base, [each]), Config):
                has_other |= is_other
                yield each
            elif is_list:
                self.left_out[str(each)] = found.why

    def design(self) -> Design:
        everywhere = (1 << len(self.settings)) - 1
        open_ = dict.fromkeys(self.features, everywhere)
        configs: list[Config] = []
        pairs: dict[Pair, int | str] = {}
        for setting in sorted(self.settings, key=self._is_plain):
            for feature in self.features:
                if not open_[feature] >> self.place[setting] & 1:
                    continue
                found = self._joined(self.base, [feature, setting])
                if isinstance(found, _Refusal):
                    pairs[feature, setting] = found.why
                    open_[feature] &= ~(1 << self.place[setting])
                    continue
                config = self._filled(found, (feature, setting), open_)
                mask = self._mask(config)
                for each in self._effective(config, self.features):
                    for other in self.settings:
                        if open_[each] & mask & 1 << self.place[other]:
                            pairs[each, other] = len(configs)
                    open_[each] &= ~mask
                configs.append(config)
        in_order = {(f, s): pairs[f, s] for f in self.features for s in self.settings}
        return Design(self.base, tuple(configs), in_order, self.left_out)

    def _is_plain(self, setting: Setting) -> bool:
        return bool(setting.value == _value(self.base, setting.key))

    def _filled(self, config: Config, pair: Pair, open_: Mapping[Setting, int]) -> Config:
        """Change other keys than the pair's, as long as pairs come up that no config has yet."""
        pinned = _pinned(pair)
        assert pinned is not None
        best = self._gain(config, open_)
        is_better = True
        while is_better:
            is_better = False
            self.random.shuffle(self.order)
            for each in self.order:
                if each.key in pinned or _value(config, each.key) == each.value:
                    continue
                found = self._joined(config, [*pair, each], depth=2, tries=_NEAR)
                if isinstance(found, Config) and (gain := self._gain(found, open_)) > best:
                    config, best, is_better = found, gain, True
        return config

    def _gain(self, config: Config, open_: Mapping[Setting, int]) -> float:
        """Return pairs that come up first in a config, by what it takes."""
        mask = self._mask(config)
        found = sum((open_[f] & mask).bit_count() for f in self._effective(config, self.features))
        return found / cost(config)

    def _mask(self, config: Config) -> int:
        return sum(1 << self.place[each] for each in self._effective(config, self.settings))

    def _effective(self, config: Config, of: Iterable[Setting]) -> Iterator[Setting]:
        """Yield the settings that a config has and that have an effect in it."""
        for each in of:
            if _value(config, each.key) == each.value and all(
                _fits(_value(config, key), needed, key) for key, needed in _needs(each).items()
            ):
                yield each

    def _joined(
        self,
        config: Config,
        wanted: Sequence[Setting],
        *,
        depth: int = _DEPTH,
        tries: int = _TRIES,
    ) -> Config | _Refusal:
        """Change a config so that it has some settings, all effective, and breaks no rule."""
        pinned = _pinned(wanted)
        if pinned is None:
            return _Refusal(f"{wanted[0]} does nothing beside {wanted[-1]}, or it there")
        given = {key: self._fitting(config, key, needed) for key, needed in pinned.items()}
        start = with_keys(config, given)
        waiting, seen, problems = deque([(start, 0)]), {start}, [""]
        while waiting and len(seen) <= tries:
            found, changed = waiting.popleft()
            problem = self._problem(found)
            if not problem:
                return found
            problems.append(problem)
            keys = [key for key in dict.fromkeys(_NAMED.findall(problem)) if key not in pinned]
            if changed == depth:
                continue
            for each in chain.from_iterable(self.values.get(key, ()) for key in keys):
                other = with_keys(found, {each.key: each.value})
                if other not in seen:
                    seen.add(other)
                    waiting.append((other, changed + 1))
        # The rule that is about most of what is wanted.
        about = {problem: sum(each.key in problem for each in wanted) for problem in problems}
        return _Refusal(max(about, key=lambda problem: about[problem]) or problems[-1])

    def _fitting(self, config: Config, key: str, needed: object) -> object:
        """The value of a key that is needed; where any will do, that of the config if it does."""
        if not isinstance(needed, EllipsisType):
            return needed
        mine = _value(config, key)
        if _fits(mine, needed, key):
            return mine
        return next(each.value for each in self.values[key] if not each.is_off)

    def _problem(self, config: Config) -> str:
        """Return the first rule that a config breaks, in words; empty: none."""
        if config.world_size > self.num_processes:
            sizes = [f"mesh.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
            keys = " x ".join([*sizes, "mesh.stage_tp"])
            return f"{keys} ({config.world_size}) must be at most {self.num_processes} processes"
        return next(rules.problems(config), "")


_KEYS_OF_AXES: Final = " ".join(axis.key for axis in AXES)


@cache
def _needs(setting: Setting) -> Mapping[str, object]:
    """Return what else a config must have for a setting to do anything."""
    if setting.is_off and not setting.is_feature:
        return {}
    found: dict[str, object] = {}
    for keys, needed in ONLY_WITH.items():
        if is_one_of(setting.key, keys) or str(setting) in keys.split():
            found |= needed
    return found


def _pinned(wanted: Sequence[Setting]) -> dict[str, object] | None:
    """Return the keys and values that settings need together; None: they exclude each other."""
    found: dict[str, object] = {each.key: each.value for each in wanted}
    for each in wanted:
        for key, needed in _needs(each).items():
            mine = found.get(key, SOME)
            if isinstance(mine, EllipsisType):
                found[key] = needed
            elif not _fits(mine, needed, key):
                return None
    return found


def _fits(value: object, needed: object, key: str) -> bool:
    if isinstance(needed, EllipsisType):
        return not Setting(key, value).is_off
    return bool(value == needed)
