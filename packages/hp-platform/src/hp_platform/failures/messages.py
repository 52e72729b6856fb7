"""Messages between ranks: agreement, and JSON of a stated form, which cannot run code."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.failures.failures import FailureReport, PeerError, mark_agreed
from hp_platform.groups import global_ranks


def agree(
    error: BaseException | None = None,
    *,
    group: ProcessGroup | None,
    where: str = "",
    device: torch.device | str = "cpu",
) -> None:
    """Exchange status before a collective phase; return on all ranks or raise on all ranks.

    Without it, a rank that raises leaves the others blocked in their next collective. It costs one
    all-gather of eight bytes per rank, and a second all-gather after a failure only.

    Args:
        error: Error of this rank, or None.
        group: Process group, usually `Runtime.control`; all its ranks must call. None: a single
            rank.
        where: Words for the phase, for the message.
        device: Device on which the group communicates; a GPU is synchronised.

    Raises:
        BaseException: `error` itself, on the ranks that pass one.
        PeerError: On all other ranks; it names every failed rank with type and message of its
            error.
        RuntimeError: If a rank is gone, so that ranks cannot agree.
    """
    if group is None:
        if error is not None:
            raise error
        return
    at = f" before {where}" if where else ""
    ranks = global_ranks(group)
    mine = ranks[group.rank()]
    text = b"" if error is None else FailureReport.of(error, rank=mine).encode().encode()
    try:
        lengths = _all_gather(torch.tensor([len(text)], device=device), group)
        reports = _reports(text, lengths, group) if bool(lengths.any()) else {}
    except RuntimeError as lost:
        if error is not None:
            error.add_note(f"the other ranks could not be told: {lost}")
            raise error from None
        lost.add_note(f"a rank was lost while all were to agree{at}")
        raise
    if error is not None:
        for rank, report in reports.items():
            if rank != mine:
                error.add_note(f"rank {rank} failed as well: {report.error}")
        mark_agreed(error, ranks)
        raise error
    if reports:
        listed = "; ".join(_listed(report, at) for report in reports.values())
        first = min(reports)
        raised = PeerError(listed, rank=first, report=reports[first])
        mark_agreed(raised, ranks)
        raise raised


@contextmanager
def agreeing(*, group: ProcessGroup | None, where: str) -> Iterator[None]:
    """Run a block on all ranks; at its end either all continue or all raise: see `agree`.

    The block must not contain collectives that a rank could miss by raising.

    Args:
        group: CPU group of the ranks; None: a single rank.
        where: Words for the work of the block, for the message.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - sent to all ranks, then raised
        error = raised
    agree(error, group=group, where=where)


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size(), *x.shape))
    _internals.all_gather(gathered.flatten(), x.flatten(), group=group)
    return gathered


def _reports(text: bytes, lengths: Tensor, group: ProcessGroup) -> dict[int, FailureReport]:
    """Exchange reports, padded to the longest; return those of failed ranks by global rank."""
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=lengths.device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=lengths.device)
    gathered = _all_gather(padded, group)
    rows = zip(global_ranks(group), gathered, lengths.flatten().tolist(), strict=True)
    texts = {rank: bytes(row[:length].tolist()) for rank, row, length in rows if length}
    return {
        rank: FailureReport.parse(said) or FailureReport(rank, "", said.decode(errors="replace"))
        for rank, said in texts.items()
    }


def _listed(report: FailureReport, at: str) -> str:
    place = f" (in {report.place})" if report.place else ""
    return f"rank {report.rank} failed{at}: {report.error}{place}"


T = TypeVar("T")
Values: TypeAlias = list[Any]
"""Values of one form that JSON has read."""

MAX_BYTES = 256 << 20
_FAILED = -1
_LEAST_BITS = 12
"""Texts are padded to a power of two of bytes, at least 4 KiB, so that messages in groups of one
kind have one size, although their texts differ in the digits of ranks."""
_PLAIN = (bool, int, float, str, NoneType)


def all_gather_json(value: T, *, of: type[T], group: ProcessGroup | None) -> list[T]:
    """Exchange values as JSON.

    The object collectives of torch unpickle bytes of another process, and a pickle can run any
    code. A process that can write to a socket of a run must not be able to do that. So ranks send
    JSON, which the receiver checks against the form that it expects.

    Args:
        value: Value of this rank.
        of: Type of every rank's value, for example ``dict[str, list[int]]``: made of bool, int,
            float, str, None, lists, tuples, dicts with str or int as keys, unions and named tuples.
        group: Process group, all ranks of which must call; None: the default group. A group without
            a backend for the CPU sends through the current CUDA device.

    Returns:
        Values of all ranks, by group rank.

    Raises:
        ValueError: If the value of this rank is not JSON, or has more than `MAX_BYTES`.
        PeerError: On the other ranks then; on all ranks if a rank sent a value of another type.
        RuntimeError: If a rank is gone.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group (None) must be given where there is no default group")
    text, error = b"", None
    try:
        text = _encode(value)
    except ValueError as raised:
        error = raised
    device = _device(group)
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    mine = torch.tensor([len(text) if error is None else _FAILED], device=device)
    _internals.all_gather(lengths, mine, group=group)
    sizes: list[int] = lengths.tolist()
    if _FAILED in sizes:
        agree(error, group=group, where="telling each other", device=device)
    longest = max(_checked_size(size, rank, group) for rank, size in enumerate(sizes))
    longest = 1 << max(_LEAST_BITS, (longest - 1).bit_length())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    _internals.all_gather(received, padded.to(device), group=group)
    data = bytes_of(received)
    return [
        _decode(data[rank * longest :][:size], of, rank, group) for rank, size in enumerate(sizes)
    ]


def on_one_rank(make: Callable[[], T], *, of: type[T], group: ProcessGroup, where: str = "") -> T:
    """Make a value on the first rank and send it to all ranks as JSON, or raise on all ranks.

    Use it for a value that all ranks need and one rank can make: the text of a searched schedule,
    or the contents of a file.

    Args:
        make: Function that returns the value; called on the first rank of the group only.
        of: Type of the value, as in `all_gather_json`; all ranks decode it from JSON.
        group: CPU group, usually `Runtime.control`, all ranks of which must call.
        where: Words for the work, for the message.

    Raises:
        Exception: Exception of `make`, on the first rank.
        PeerError: On all other ranks then.
        RuntimeError: If a rank is gone.
    """
    text = b""
    with agreeing(group=group, where=where):
        if group.rank() == 0:
            text = _encode(make())
    size = torch.tensor([len(text)], device="cpu")
    dist.broadcast(size, group_src=0, group=group)
    data = torch.empty(_checked_size(int(size), 0, group), dtype=torch.uint8, device="cpu")
    if group.rank() == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, group_src=0, group=group)
    return _decode(bytes_of(data), of, 0, group)


def _encode(value: object) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"value ({type(value).__name__}) must be JSON: {error}") from None
    if len(text) > MAX_BYTES:
        raise ValueError(f"JSON of value ({len(text)} bytes) must have at most {MAX_BYTES} bytes")
    return text


def _checked_size(size: int, rank: int, group: ProcessGroup) -> int:
    if not 0 < size <= MAX_BYTES:
        sender = global_ranks(group)[rank]
        text = f"bytes that rank {sender} sends ({size}) must be in [1, {MAX_BYTES}]"
        raise PeerError(text, rank=sender)
    return size


def _decode(text: bytes, of: type[T], rank: int, group: ProcessGroup) -> T:
    try:
        return cast("T", as_form(of, json.loads(text)))
    except (ValueError, RecursionError) as error:
        sender = global_ranks(group)[rank]
        raise PeerError(f"what rank {sender} sent must be {of}: {error}", rank=sender) from None


def as_form(form: object, value: object) -> Any:
    """Convert a value that JSON has read to the type that it must have: see `all_gather_json`.

    A named tuple may be a list, as in messages, or an object of its fields.

    Raises:
        ValueError: If the value has another type.
    """
    return _as_forms(form, [value])[0]


def _as_forms(form: object, values: Values) -> Values:
    """Convert many values of one type, column by column, as manifests have thousands of them."""
    origin, parts, types = get_origin(form), get_args(form), set(map(type, values))
    found: Values
    if not values or (form in _PLAIN and types == {form}):
        found = values
    elif form is float and types <= {int, float}:
        found = list(map(float, values))
    elif origin is list and types == {list}:
        found = _as_lists(parts[0], values)
    elif origin is dict and types == {dict}:
        keys = chain.from_iterable(values)
        items = _as_forms(parts[1], list(chain.from_iterable(map(dict.values, values))))
        pairs = zip(map(int, keys) if parts[0] is int else keys, items, strict=True)
        found = [dict(islice(pairs, len(value))) for value in values]
    elif origin is tuple and parts[1:] == (...,) and types == {list}:
        found = list(map(tuple, _as_lists(parts[0], values)))
    elif origin is tuple:
        found = list(zip(*_columns(parts, values), strict=True)) if parts else [()] * len(values)
    elif isinstance(form, type) and hasattr(form, "_fields"):  # a named tuple
        names, known = form._fields, set(form._fields)
        lists = [
            list(map(value.__getitem__, names))
            if isinstance(value, dict) and value.keys() == known
            else value
            for value in values
        ]
        found = list(map(form, *_columns(_forms_of(form), lists)))
    elif origin in (Union, UnionType):
        found = [_as_one_of(parts, value) for value in values]
    else:
        right = {int, float} if form is float else {form, origin}
        wrong = next((v for v in values if type(v) not in right), values[0])
        raise ValueError(f"{str(wrong)[:80]!r} must be {form}")
    return found


@cache
def _forms_of(form: type) -> tuple[object, ...]:
    hints = get_type_hints(form)
    return tuple(hints.values())


def _as_lists(form: object, values: Values) -> list[Values]:
    """Convert lists of items of one type, checked as a single list of all items."""
    items = iter(_as_forms(form, list(chain.from_iterable(values))))
    return [list(islice(items, len(value))) for value in values]


def _columns(forms: Sequence[object], values: Values) -> list[Values]:
    """Convert the first items of all values, then the second items, each to its type."""
    for value in values:
        if not isinstance(value, list) or len(value) != len(forms):
            raise ValueError(f"{str(value)[:80]!r} must be a list of {len(forms)}")
    return [
        _as_forms(form, list(column))
        for form, column in zip(forms, zip(*values, strict=True), strict=True)
    ]


def _as_one_of(forms: Sequence[object], value: object) -> object:
    for form in forms:
        try:
            return as_form(form, value)
        except ValueError:
            continue
    raise ValueError(f"{str(value)[:80]!r} must be one of {forms}")


def _device(group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    # A group that wraps another group, as in hp_platform.testing, has no name of a backend.
    if _internals.backend_name(group, cpu) is not None or not torch.cuda.is_available():
        return cpu
    return torch.device("cuda", torch.cuda.current_device())


def bytes_of(x: Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order, without NumPy, which may be missing."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    buffer = bytearray(len(flat))
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(flat)
    return bytes(buffer)
