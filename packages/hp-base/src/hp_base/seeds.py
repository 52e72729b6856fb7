"""Seeds of draws that are a pure function of the run's seed and of what a draw is for."""

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return the seed of one purpose, below 2**63.

    Args:
        seed: The run's seed.
        parts: Parts of the purpose's name, for example ``("layers.3.attention.wq", 7)``.
    """
    text = "\x1f".join((str(seed), *map(str, parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
