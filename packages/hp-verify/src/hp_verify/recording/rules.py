"""A file of rules, in TOML, for parameters that neither a library nor values can place.

Nothing here imports torch.
"""

import re
import tomllib
from collections.abc import Collection
from pathlib import Path

import msgspec

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_verify.recording.events import Box

_PLACEMENT = re.compile(r"shard (?P<dim>\d+)(?: over (?P<group>\w+))?|replicate")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    r"""Rule for the parameters whose names fit an expression.

    Attributes:
        name: Regular expression of the whole name in the job.
        reference: The reference's name, in which ``\1`` is a group of the expression; empty: the
            same.
        placement: ``shard DIM``, among all ranks, ``shard DIM over GROUP``, or ``replicate``; of
            several the first is cut first.
    """

    name: str
    reference: str = ""
    placement: list[str] = []


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rules.

    Attributes:
        groups: Name -> groups of ranks that share tensors, each in the order of its parts.
        parameter: The rules, of which the first that fits a name counts.
    """

    groups: dict[str, list[list[int]]] = {}
    parameter: list[Rule] = []

    def of(self, name: str) -> tuple[str, Rule] | None:
        """Return a parameter's name in the reference and its rule; None: no rule fits."""
        for rule in self.parameter:
            match = re.fullmatch(rule.name, name)
            if match is not None:
                return match.expand(rule.reference) if rule.reference else name, rule
        return None

    def idle(self, names: Collection[str]) -> list[str]:
        """Return expressions that fit none of these names."""
        texts = [rule.name for rule in self.parameter]
        return [text for text in texts if not any(re.fullmatch(text, name) for name in names)]

    def box(self, rule: Rule, shape: tuple[int, ...], rank: int, ranks: int) -> Box:
        """Return the part of a tensor that a rank has.

        Args:
            rule: Rule of the tensor.
            shape: Shape of the whole.
            rank: The rank.
            ranks: Number of ranks.

        Raises:
            ConfigError: When the rule does not fit the shape or says nothing of the rank.
        """
        spans = [(0, size) for size in shape]
        for text in rule.placement:
            match = _PLACEMENT.fullmatch(text)
            assert match is not None
            if match["dim"] is None:
                continue
            dim = int(match["dim"])
            if dim >= len(shape):
                raise ConfigError(f"rule {rule.name}: {text} of a tensor of shape {shape}")
            groups = self.groups[match["group"]] if match["group"] else [list(range(ranks))]
            group = next((group for group in groups if rank in group), None)
            if group is None:
                raise ConfigError(f"rule {rule.name}: rank {rank} is in no group {match['group']}")
            begin, end = spans[dim]
            size = -(-(end - begin) // len(group))
            first = begin + group.index(rank) * size
            spans[dim] = min(first, end), min(first + size, end)
        return tuple(spans)


def read_rules(path: Path) -> Rules:
    """Read a file of rules.

    Raises:
        ConfigError: When it cannot be read, or is not one.
    """
    try:
        rules = msgspec.convert(tomllib.loads(read_named(path).decode()), Rules)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--rules ({path}): {why_not(error)}") from None
    for rule in rules.parameter:
        try:
            # The empty text fits, so that groups of the reference's name are looked at.
            empty = re.compile(f"(?:{rule.name})?").fullmatch("")
            assert empty is not None
            empty.expand(rule.reference)
        except (re.error, IndexError) as error:
            raise ConfigError(f"--rules ({path}): name {rule.name}: {error}") from None
        for text in rule.placement:
            match = _PLACEMENT.fullmatch(text)
            if match is None:
                raise ConfigError(
                    f"--rules ({path}): placement {text} must be 'shard DIM', "
                    "'shard DIM over GROUP' or 'replicate'"
                )
            if match["group"] and match["group"] not in rules.groups:
                raise ConfigError(f"--rules ({path}): there is no group {match['group']}")
    return rules
