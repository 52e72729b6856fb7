"""A tensor that differs, element by element: where, on which ranks, and what is there instead."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from hp_base.dtypes import dtype_name
from hp_verify.comparing.findings import Exact
from hp_verify.recording.events import Box
from hp_verify.recording.slices import index_of
from hp_verify.recording.values import Part

_MOST_RATIO = 64
_MOST_SLICES = 1024
"""Slices of a dim that are looked for in another order."""
_MOST_SHIFT = 8
_SHOWN = 6
_ORDINALS = {2: "second", 3: "third"}
_SHORTER = (torch.bfloat16, torch.float16)


def exact(
    expected: Tensor,
    actual: Tensor,
    *,
    parts: Sequence[Part],
    bound: float,
    others: Mapping[str, Tensor],
    offsets: Mapping[str, Tensor],
    dims: Sequence[str] = (),
    terms: Mapping[str, Tensor] | None = None,
) -> Exact | None:
    """Say what of a tensor differs.

    Args:
        expected: The reference's.
        actual: The job's, of the same shape.
        parts: Parts of the tensor on ranks; empty: ranks have terms of a sum.
        bound: Difference that rounding explains, relative to the root mean square.
        others: Candidates for the job's values, by name.
        offsets: Rows of another place that it may have: a name for each.
        dims: Names of the dims.
        terms: Terms whose multiples it may be a sum of, and a name for each.

    Returns:
        None where nothing differs.
    """
    theirs, mine = expected.detach().double(), actual.detach().double()
    tolerance = bound * float(theirs.square().mean().sqrt())
    differs = _differs(mine, theirs, tolerance)
    wrong = _wrong_ranks(parts, theirs, tolerance)
    own = [part for part in parts if part.rank in wrong]
    if not differs.any() and own:  # the first rank that holds it is right, another is not
        mine = mine.clone()
        for part in own:
            mine[index_of(part.box)] = part.values.double()
        differs = _differs(mine, theirs, tolerance)
    if not differs.any():
        return None
    errors = torch.where(differs, (mine - theirs).abs().nan_to_num(math.inf), -1.0)
    at = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    kind = (
        _kind(mine, theirs, differs, tolerance, others, offsets)
        or _by_rank(own, theirs, tolerance)
        or _untaken(parts, theirs, tolerance)
        or mixture(mine, terms or {}, 10 * bound)
    )
    count, total = int(differs.sum()), differs.numel()
    where = _where(differs, dims or _names_of(theirs))
    amount = f"all {total:,}" if count == total else f"{count:,} of {total:,}"
    holds = _holders(wrong, parts)
    value, other = float(mine[at]), float(theirs[at])
    sentence = (
        f"{amount} elements differ{where}{holds}"
        f"{': they are ' + kind if kind else ''}; the largest error, {abs(value - other):.3e}, "
        f"is at {list(at)}: {value:.6g} in place of {other:.6g}"
    )
    return Exact(sentence, at, other, value, wrong, count, total, kind)


def _differs(mine: Tensor, theirs: Tensor, tolerance: float) -> Tensor:
    return ~((mine - theirs).abs() <= tolerance)


def _wrong_ranks(parts: Sequence[Part], theirs: Tensor, tolerance: float) -> tuple[int, ...]:
    wrong = {
        part.rank
        for part in parts
        if bool(_differs(part.values.double(), theirs[index_of(part.box)], tolerance).any())
    }
    return tuple(sorted(wrong))


def _holders(wrong: Sequence[int], parts: Sequence[Part]) -> str:
    ranks = sorted({part.rank for part in parts})
    if not wrong or len(ranks) < 2:
        return ""
    right = [rank for rank in ranks if rank not in wrong]
    said = f", which {ranks_in_words(wrong)} hold{'s' * (len(wrong) == 1)}"
    return said + (f" ({ranks_in_words(right)}: right)" if right else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Say ranks in words: rank 1; ranks 0 and 1; ranks 0..3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _names_of(values: Tensor) -> Sequence[str]:
    if values.ndim == 2:
        return "rows", "columns"
    return ["elements"] if values.ndim == 1 else [f"dim {d}" for d in range(values.ndim)]


def _where(differs: Tensor, names: Sequence[str]) -> str:
    """Say which indices of each dim differ, where not all do."""
    found = []
    for dim, name in enumerate(names[: differs.ndim]):
        rest = [d for d in range(differs.ndim) if d != dim]
        index = torch.nonzero(differs.amax(rest) if rest else differs)[:, 0].tolist()
        if len(index) < differs.shape[dim]:
            found.append(_indices(name, index, differs.shape[dim]))
    return f", in {' and '.join(found)}" if found else ""


def _indices(name: str, index: Sequence[int], size: int) -> str:
    """Say indices in words: rows 8..15 of 16; row 3 of 16; every 4th of 16 rows from 1."""
    where = name if name.startswith("dim") else ""
    names, one = ("indices", "index") if where else (name, name.removesuffix("s"))
    steps = {b - a for a, b in itertools.pairwise(index)}
    if not steps:
        said = f"{one} {index[0]} of {size}"
    elif steps == {1}:
        said = f"{names} {index[0]}..{index[-1]} of {size}"
    elif len(index) <= _SHOWN:
        said = f"{names} {', '.join(map(str, index))} of {size}"
    elif len(steps) == 1:
        step = steps.pop()
        said = f"every {_ORDINALS.get(step, f'{step}th')} of {size} {names} from {index[0]}"
    else:
        said = f"{len(index)} of {size} {names}"
    return f"{said} of {where}" if where else said


def _kind(  # noqa: PLR0917
    mine: Tensor,
    theirs: Tensor,
    differs: Tensor,
    tolerance: float,
    others: Mapping[str, Tensor],
    offsets: Mapping[str, Tensor],
) -> str:
    """Return what the differing elements are; empty: nothing that is known."""
    a, b = mine[differs], theirs[differs]
    if not bool(a.isfinite().all()):
        return "not finite"
    if not bool(a.any()):
        return "zero"
    if not bool(b.any()):
        return "zero in the reference"
    if scale := _scale(a, b, tolerance):
        return f"{scale} times the reference's"
    for name, other in others.items():
        values = other.double()
        if values.shape == mine.shape and not bool(
            _differs(mine, values, tolerance)[differs].any()
        ):
            return name
    return (
        _moved(mine, theirs, tolerance)
        or _offset(mine - theirs, tolerance, offsets)
        or _rounded(a, b, tolerance)
    )


def _scale(a: Tensor, b: Tensor, tolerance: float) -> str:
    """Return the factor that all elements have in common, as a ratio where it is a simple one."""
    factor = float((a @ b) / (b @ b))
    if a.numel() < 2 or bool(_differs(a, factor * b, tolerance * max(1.0, abs(factor))).any()):
        return ""
    near = Fraction(factor).limit_denominator(_MOST_RATIO)
    is_near = abs(float(near) - factor) <= max(1e-4, tolerance) * abs(factor)
    return str(near) if is_near else f"{factor:.5g}"


def _by_rank(parts: Sequence[Part], theirs: Tensor, tolerance: float) -> str:
    """Say the factor of each rank."""
    found: dict[int, str] = {}
    for part in parts:
        a, b = part.values.double().flatten(), theirs[index_of(part.box)].flatten()
        scale = _scale(a, b, tolerance) if bool(a.any()) and bool(b.any()) else ""
        if not scale or found.setdefault(part.rank, scale) != scale:
            return ""
    return ", ".join(f"{scale} times the reference's on rank {r}" for r, scale in found.items())


def _untaken(parts: Sequence[Part], theirs: Tensor, tolerance: float) -> str:
    """Return whether ranks have terms of a sum or of a mean that was not taken."""
    by_box: dict[Box, dict[int, Tensor]] = defaultdict(dict)
    for part in parts:
        by_box[part.box].setdefault(part.rank, part.values.double())
    if not by_box or any(len(held) < 2 for held in by_box.values()):
        return ""
    ranks = ranks_in_words(sorted({part.rank for part in parts}))
    for how in ("sum", "mean"):
        made = {box: torch.stack(list(held.values())) for box, held in by_box.items()}
        taken = {box: x.sum(0) if how == "sum" else x.mean(0) for box, x in made.items()}
        apart = [_differs(x, theirs[index_of(box)], tolerance).any() for box, x in taken.items()]
        if not any(map(bool, apart)):
            return f"terms of a {how} over {ranks} that was not taken"
    return ""


def _moved(mine: Tensor, theirs: Tensor, tolerance: float) -> str:
    """Return whether slices are the reference's in another order."""
    is_square = mine.ndim == 2 and mine.shape[0] == mine.shape[1]
    if is_square and not bool(_differs(mine, theirs.T, tolerance).any()):
        return "the reference's, transposed"
    for dim in range(mine.ndim):
        order = _order(mine.movedim(dim, 0), theirs.movedim(dim, 0), tolerance)
        if order is None:
            continue
        size = len(order)
        shifts = {(j - i) % size for i, j in enumerate(order)}
        name = _names_of(mine)[dim]
        if len(shifts) == 1:
            shift = shifts.pop()
            by = shift if shift <= size // 2 else shift - size
            return f"the reference's {name} moved by {-by}"
        shown = ", ".join(map(str, order[:_SHOWN])) + ", ..." * (size > _SHOWN)
        return f"the reference's {name} in another order: {shown}"
    return _shifted(mine, theirs, tolerance)


def _shifted(mine: Tensor, theirs: Tensor, tolerance: float) -> str:
    """Tell whether slices are the reference's at other places, others having come in at the end."""
    for dim, size in enumerate(mine.shape):
        for by in range(1, min(_MOST_SHIFT, size // 2) + 1):
            for a, b, sign in ((mine, theirs, 1), (theirs, mine, -1)):
                here, there = a.narrow(dim, by, size - by), b.narrow(dim, 0, size - by)
                is_told = bool(_differs(here, here.mean(), tolerance).any())
                if is_told and not bool(_differs(here, there, tolerance).any()):
                    name = _names_of(mine)[dim]
                    return f"the reference's {name} moved by {sign * by}, with others at the end"
    return ""


def _order(mine: Tensor, theirs: Tensor, tolerance: float) -> list[int] | None:
    """Return which slice of the reference each slice is; None: some are none of them."""
    if not 2 <= len(mine) <= _MOST_SLICES:
        return None
    a, b = mine.reshape(len(mine), -1), theirs.reshape(len(mine), -1)
    if a.shape[1] < 2:
        return None
    nearest = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    if bool(_differs(a, b[nearest], tolerance).any()):
        return None
    return [int(i) for i in nearest]


def _offset(difference: Tensor, tolerance: float, offsets: Mapping[str, Tensor]) -> str:
    """Return whether it is off by the same row everywhere."""
    if difference.ndim < 2:
        return ""
    rows = difference.flatten(0, -2)
    row = rows.mean(0)
    if len(rows) < 2 or bool(_differs(rows, row.expand_as(rows), tolerance).any()):
        return ""
    for name, other in offsets.items():
        values = other.double()
        is_like = values.shape == row.shape and bool(values.any())
        if is_like and (times := _scale(row, values, tolerance)):
            return f"off by {times} times {name}"
    return "off by the same row everywhere"


def _rounded(a: Tensor, b: Tensor, tolerance: float) -> str:
    for dtype in _SHORTER:
        step = torch.finfo(dtype).eps
        is_short = bool((a.to(dtype).double() - a).abs().max() <= 0)
        if is_short and not bool(((a - b).abs() > 4 * step * b.abs().max() + tolerance).any()):
            return f"rounded to {dtype_name(dtype)}"
    return ""


def mixture(value: Tensor, terms: Mapping[str, Tensor], bound: float) -> str:
    """Return which multiples of terms a tensor is the sum of; empty: none that are simple ratios.

    Args:
        value: Sum to take apart.
        terms: A name for each; fewer than `value` has elements.
        bound: Error that rounding explains, relative to the norm of `value`.
    """
    if not terms or value.numel() < 2 * len(terms):
        return ""
    matrix = torch.stack([term.double().flatten() for term in terms.values()], 1)
    wanted = value.double().flatten()
    if not bool(matrix.isfinite().all() & wanted.isfinite().all()):
        return ""
    found = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
    near = [Fraction(float(f)).limit_denominator(_MOST_RATIO) for f in found]
    made = matrix @ torch.tensor([float(f) for f in near], dtype=torch.float64)
    if float((made - wanted).norm()) > bound * float(wanted.norm()):
        return ""
    by_factor: dict[Fraction, list[str]] = {}
    for factor, name in zip(near, terms, strict=True):
        by_factor.setdefault(factor, []).append(name)
    said = [f"{f} times {', '.join(names)}" for f, names in by_factor.items() if f != 0]
    lost = f"; nothing of {', '.join(by_factor[Fraction(0)])}" if Fraction(0) in by_factor else ""
    return "a sum of " + " and ".join(said) + lost if said else ""


def combinations(own: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what ranks' own tensors may have become: each of them, their sum, their mean.

    Args:
        own: Rank -> tensor of one shape.
    """
    total = torch.stack(list(own.values())).sum(0)
    if len(own) > 1:
        yield f"the sum of what {ranks_in_words(sorted(own))} have", total
        yield f"the mean of what {ranks_in_words(sorted(own))} have", total / len(own)
    for rank, values in own.items():
        yield f"what rank {rank} has alone", values
