"""Retention of tensors between forward and backward: recompute, or copies on the host."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hp_platform import Event, current_stream, side_stream, use_stream

ContextFunction = Callable[
    [], tuple[AbstractContextManager[object], AbstractContextManager[object]]
]
"""Makes the contexts of a forward and of its RECOMPUTE, as `torch.utils.checkpoint` has it."""


class Recomputation:
    """State that a forward needs to be run again, beside its arguments.

    Args:
        device: Device of the second generator that is saved and restored, besides the CPU's.
        preserve_rng_state: Whether it draws from generators.
        context_fn: Makes the contexts of the two runs.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        preserve_rng_state: bool,
        context_fn: ContextFunction | None,
    ) -> None:
        contexts = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
        self._first, self._second = contexts
        self._devices = [device] if device.type == "cuda" else []
        self._states: list[Tensor] = []
        if preserve_rng_state:
            on_gpu = [torch.cuda.get_rng_state(device) for device in self._devices]
            self._states = [torch.get_rng_state(), *on_gpu]

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Save nothing for a backward inside."""
        with self._first, saved_tensors_hooks(_drop, _missing):
            yield

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Draw the random numbers of the first run inside; the generators go on as before."""
        draws = bool(self._states)
        with torch.random.fork_rng(self._devices, enabled=draws), self._second:
            if draws:
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._devices, self._states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield


def _drop(_: Tensor) -> None:
    """Save nothing in place of a tensor."""


def _missing(_: object) -> Tensor:
    raise RuntimeError("a forward that kept nothing must be run again before its backward")


@dataclass(slots=True)
class _Stored:
    """One storage that tensors are saved in.

    Attributes:
        storage: The bytes on the device; None while they are on the host.
        device: Device of the storage.
        num_bytes: Size of the storage.
        host: The bytes while they are away, uint8.
    """

    storage: torch.UntypedStorage | None
    device: torch.device
    num_bytes: int
    host: Tensor | None = None

    def tensor(
        self,
        dtype: torch.dtype,
        offset: int | torch.SymInt,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> Tensor:
        """Return a tensor that lies in it.

        Raises:
            RuntimeError: If it is away.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self.here(), offset, shape, strides)

    def here(self) -> torch.UntypedStorage:
        """Return the storage.

        Raises:
            RuntimeError: If it is away.
        """
        if self.storage is None:
            raise RuntimeError("what a forward has kept must be brought back before its backward")
        return self.storage


_Handle = Callable[[], Tensor]
"""Returns a saved tensor, of which it knows the storage and how the tensor lies in it."""


class SavedTensors:
    """Tensors that autograd saves in one forward, which can be copied to the host and back.

    Autograd saves tensors through hooks. A forward that is run again saves nothing: its graph is
    dropped when it ends, and the RECOMPUTE step makes another. A forward whose saved tensors are
    copied away saves handles, which know a storage and how a tensor lies in it. OFFLOAD copies each
    storage once, however many tensors lie in it, and forgets it on the device; RELOAD makes new
    ones. Backward finds the same bytes in the same layout, so the same kernels give the same bits.
    Tensors that others hold anyway stay where they are: parameters and buffers, inputs and outputs
    of the stage, arguments that the caller has passed.

    Args:
        device: Device of the stage.
        is_moved: Predicate of a saved tensor: whether it is moved; None: all are.
        stays: Tensors whose memory others hold anyway.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_moved: Callable[[Tensor], bool] | None,
        stays: Iterable[Tensor],
    ) -> None:
        self._device = device
        self._is_moved = is_moved
        # Storages are objects of their own, as long as somebody holds them.
        self._staying = {id(x): x for x in map(_storage_of, stays) if x is not None}
        self._stored: dict[int, _Stored] = {}
        self._written: list[tuple[Tensor, int]] = []  # saved tensors, and the writes they had seen
        self._back: Event | None = None

    def saving(self) -> AbstractContextManager[None]:
        """Save handles for a backward inside."""
        return saved_tensors_hooks(self._pack, _unpack)

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Leave tensors that the forward has returned where they are."""
        for storage in map(_storage_of, tensors):
            if storage is not None:
                self._stored.pop(id(storage), None)

    def offload(self) -> int:
        """Start to copy everything to the host, and forget it on the device.

        On CUDA the copies go on beside what is computed; memory is used again behind them.

        Returns:
            Bytes that are copied.

        Raises:
            RuntimeError: If a tensor was changed in place after it was saved, which autograd itself
                would refuse in backward.
        """
        for tensor, version in self._written:
            if _version(tensor) != version:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that backward needs was changed in place"
                )
        self._written.clear()
        stream = side_stream(self._device, "offload")
        _follow(stream, current_stream(self._device), self._device)
        with use_stream(stream):
            for stored in self._stored.values():
                if stored.here().nbytes() != stored.num_bytes:
                    raise RuntimeError(
                        "memory that backward needs was freed: is it that of parameters which are "
                        "gathered and freed inside the forward?"
                    )
                here = stored.tensor(torch.uint8, 0, (stored.num_bytes,), (1,))
                stored.host = torch.empty(
                    stored.num_bytes, dtype=torch.uint8, pin_memory=stream is not None
                )
                stored.host.copy_(here, non_blocking=stream is not None)
                if stream is not None:
                    here.record_stream(stream)
                stored.storage = None
        return sum(stored.num_bytes for stored in self._stored.values())

    def reload(self) -> None:
        """Start to bring everything back, into new memory."""
        stream = side_stream(self._device, "reload")
        memory = [
            (stored, torch.empty(stored.num_bytes, dtype=torch.uint8, device=self._device))
            for stored in self._stored.values()
        ]
        # Behind the copies out, and behind whoever used the new memory before.
        for before in (side_stream(self._device, "offload"), current_stream(self._device)):
            _follow(stream, before, self._device)
        with use_stream(stream):
            for stored, here in memory:
                assert stored.host is not None
                here.copy_(stored.host, non_blocking=stream is not None)
                stored.storage, stored.host = here.untyped_storage(), None
            self._back = Event(self._device)
            self._back.record()

    def wait(self) -> None:
        """Let later computations wait until everything is back."""
        if self._back is not None:
            self._back.wait()

    def _pack(self, tensor: Tensor) -> _Handle | Tensor:
        storage = _storage_of(tensor)
        if (
            storage is None
            or tensor.device.type != self._device.type
            or id(storage) in self._staying
            or (self._is_moved is not None and not self._is_moved(tensor))
        ):
            return tensor
        stored = self._stored.get(id(storage))
        if stored is None:
            stored = self._stored[id(storage)] = _Stored(storage, self._device, storage.nbytes())
        seen = tensor.detach()  # without its graph, which would keep itself alive
        self._written.append((seen, _version(seen)))
        layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        return partial(stored.tensor, tensor.dtype, *layout)


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - torch has no public spelling


def _unpack(packed: _Handle | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a plain tensor; None for other layouts and for wrappers."""
    is_plain = type(tensor) in {Tensor, nn.Parameter} and tensor.layout is torch.strided
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def _follow(
    stream: torch.cuda.Stream | None, before: torch.cuda.Stream | None, device: torch.device
) -> None:
    """Let a stream wait for all work of another one so far; both are None on a CPU."""
    given = Event(device)
    given.record(before)
    given.wait(stream)


def tensors_within(value: object) -> Iterator[Tensor]:
    """Yield the tensors in an argument, in sequences and mappings too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_within(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from tensors_within(part)
