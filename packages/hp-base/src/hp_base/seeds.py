"""Seeds of random draws as a pure function of the run's seed and the purpose of a draw."""

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return the seed for a purpose, below 2**63.

    Args:
        seed: Seed of the run.
        parts: Parts of the name of the purpose, for example ``("layers.3.attention.wq", 7)``.
    """
    text = "\x1f".join((str(seed), *map(str, parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
