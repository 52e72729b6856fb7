"""Keys and their values as messages name them, and the nearest values that would do."""

import math

from hp_trainer.config import MeshConfig

DATA_AXES = ("dp_replicate", "dp_shard")
STAGE_AXES = (*DATA_AXES, "cp", "tp")


def shown_factors(mesh: MeshConfig, *axes: str) -> str:
    """Return the axes and their sizes as a product; those of one rank are left out but for pp."""
    sizes = {axis: getattr(mesh, axis) for axis in axes}
    shown_axes = [axis for axis, size in sizes.items() if size > 1 or axis == "pp"]
    return " x ".join(f"{_key(mesh, axis)} ({sizes[axis]})" for axis in shown_axes or axes[:1])


def _key(mesh: MeshConfig, axis: str) -> str:
    """Return the key that an axis has its size from."""
    is_listed = axis in ("tp", "ep") and getattr(mesh, f"stage_{axis}")
    return f"mesh.stage_{axis}" if is_listed else f"mesh.{axis}"


def shown_product(mesh: MeshConfig, *axes: str) -> str:
    """Return the axes and their sizes as a product, and what it comes to."""
    factors = shown_factors(mesh, *axes)
    total = math.prod(getattr(mesh, axis) for axis in axes)
    return f"{factors} = {total}" if " x " in factors else factors


def near_divisors(value: int, of: int, *, name: str = "") -> str:
    """Hint at the divisors of a number on either side of a value that is none."""
    if of > 10**6:
        return ""
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return "; nearest: " + name + " or ".join(map(str, below + above))


def near_multiples(value: int, of: int) -> str:
    """Hint at the multiples of a number on either side of a value that is none."""
    low = value // of * of
    return "; nearest: " + " or ".join(str(n) for n in (low, low + of) if n > 0)
