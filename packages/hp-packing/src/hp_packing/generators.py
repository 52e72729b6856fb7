"""Lengths of documents: drawn from a named distribution, or read from a file."""

import math
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not

K = 1024
_BYTES_PER_TOKEN = 4
_MOST_BYTES = 1 << 30
_DIGITS = len(str(2**40))
_Draw = Callable[[Random], float]


@cache
def _library() -> tuple[int, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = filter(Path.is_file, sorted(root.rglob("*.py")))  # Debian links to one that may be gone
    sizes = [path.stat().st_size // _BYTES_PER_TOKEN for path in files]
    return tuple(filter(None, sizes))


GENERATORS: Mapping[str, _Draw] = {
    "mock": lambda rng: min(max(rng.lognormvariate(math.log(4 * K) - 1.1**2 / 2, 1.1), K), 8 * K),
    "lognormal-2k": lambda rng: rng.lognormvariate(math.log(2 * K), 1.1),
    "lognormal-8k": lambda rng: rng.lognormvariate(math.log(8 * K), 1.1),
    "log-uniform": lambda rng: math.exp(rng.uniform(math.log(8 * K), math.log(128 * K))),
    "few-long": lambda rng: 64 * K if rng.random() < 0.05 else 2 * K,
    "source-files": lambda rng: rng.choice(_library()),
}
"""Megatron's mock, of mean 4k, cut at 1k and 8k; lognormal with sigma 1.1; log-uniform from 8k to
128k; 5 % of 64k among 2k; files of Python's standard library, four bytes a token."""


def draw(name: str, *, tokens: int, longest: int, seed: int) -> list[int]:
    """Draw documents of a number of tokens in total; the last one is cut.

    Args:
        name: Key of `GENERATORS`.
        tokens: Tokens of all documents together.
        longest: Tokens to which longer documents are cut.
        seed: Seed of the draws.
    """
    rng, left = Random(seed), tokens  # noqa: S311 - nothing is secret
    lengths: list[int] = []
    while left:
        lengths.append(max(1, min(int(GENERATORS[name](rng)), longest, left)))
        left -= lengths[-1]
    return lengths


def drawn(
    source: str | Path, *, tokens: int, longest: int, number: int, seed: int = 0
) -> list[list[int]]:
    """Draw batches, or read them.

    Args:
        source: Name of a distribution, or else path of a file of lengths.
        tokens: Tokens of a batch.
        longest: Tokens to which longer documents are cut.
        number: Maximum number of batches.
        seed: Seed of the first batch; each further batch has the next one.

    Raises:
        ConfigError: When the file cannot be read or has less than a batch.
    """
    if isinstance(source, str) and source in GENERATORS:
        seeds = range(seed, seed + number)
        return [draw(source, tokens=tokens, longest=longest, seed=each) for each in seeds]
    return read_batches(Path(source), tokens=tokens, longest=longest)[:number]


def read_lengths(path: Path) -> list[int]:
    """Read lengths: one to a line, or separated by blanks or commas.

    Raises:
        ConfigError: When the file cannot be read, or a word of a line is no length.
    """
    try:
        text = read_named(path, limit=_MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"lengths: cannot read {path}: {why_not(error)}") from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for word in line.replace(",", " ").split():
            if not word.isdecimal() or len(word) > _DIGITS or not 1 <= int(word) <= 2**40:
                raise ConfigError(f"{path}, line {number}: {word[:40]!r} must be a length, >= 1")
            found.append(int(word))
    if not found:
        raise ConfigError(f"{path} must have lengths of documents")
    return found


def batches_of(lengths: Sequence[int], *, tokens: int, longest: int) -> list[list[int]]:
    """Cut documents, in their order, into batches of a number of tokens; drop the rest."""
    found = stream((min(length, longest) for length in lengths), seq_len=tokens)
    return [batch for batch in found if sum(batch) == tokens]


def read_batches(path: Path, *, tokens: int, longest: int) -> list[list[int]]:
    """Read global batches of a number of tokens, as `batches_of` cuts them.

    Args:
        path: File of lengths, see `read_lengths`.
        tokens: Tokens of a batch.
        longest: Tokens to which longer documents are cut.

    Raises:
        ConfigError: When the file cannot be read, or has less than a batch.
    """
    lengths = read_lengths(path)
    found = batches_of(lengths, tokens=tokens, longest=longest)
    if not found:
        raise ConfigError(f"{path} must have at least {tokens} tokens, not {sum(lengths)}")
    return found


def stream(lengths: Iterable[int], *, seq_len: int) -> list[list[int]]:
    """Put documents into full sequences, cut at their ends; the last sequence may be shorter."""
    found: list[list[int]] = [[]]
    room = seq_len
    for length in lengths:
        rest = length
        while rest:
            piece = min(rest, room)
            found[-1].append(piece)
            rest, room = rest - piece, room - piece
            if not room:
                found.append([])
                room = seq_len
    return found if found[-1] else found[:-1]
