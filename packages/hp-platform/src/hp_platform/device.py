"""The device of this process, its backend and streams, operands on two devices, and float64.

Streams and events do nothing on a CPU, so that code with streams runs everywhere: a stream is a
`torch.cuda.Stream` on CUDA and None on a CPU, which has finished when a call returns.

In a lifted job, parameters, factories and casts to shorter floats give float64 instead. Rounding is
then about 1e-16, so that a larger difference between two jobs is a mistake.
"""

import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, islice
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hp_platform import _internals

_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_MULTI_RANK_SINCE = (2, 30)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
_INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put_impl")
_FILLED = ("aten::fill", "aten::masked_fill")


def local_device(local_rank: int = 0, *, device_type: str = "auto") -> torch.device:
    """Choose the device of this process and make it the current one.

    Args:
        local_rank: Rank of this process on its machine. GPUs are dealt in rounds, so several ranks
            share one when there are more ranks than GPUs.
        device_type: `"cpu"`, `"cuda"` or `"auto"`: CUDA where there is a GPU.

    Raises:
        ValueError: If `device_type` is unknown, or is `"cuda"` where there is no GPU.
    """
    if device_type not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device_type ({device_type}) must be one of auto, cpu, cuda")
    num_devices = 0 if device_type == "cpu" else torch.cuda.device_count()
    if device_type == "cuda" and num_devices == 0:
        raise ValueError("device_type (cuda) must be cpu or auto: this process sees no GPU")
    if num_devices == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def ranks_per_device(device: torch.device, world_size: int, store: _internals.Store) -> int:
    """Count the ranks that share the busiest device of the world; 1 where all are CPUs.

    The number of visible devices does not suffice: Slurm shows each task one GPU under the same
    index, which may be one GPU for all tasks or another GPU for each. So every rank writes the
    identity of its device to the store. All ranks call this together and get the same answer.

    Args:
        device: Device of this rank.
        world_size: Number of ranks.
        store: Store that all ranks share.
    """
    if device.type == "cpu":
        return 1
    place = store.add(f"ranks of {socket.gethostname()} {_identity(device)}", 1)
    store.add(f"devices with {place} ranks", 1)
    if store.add("ranks that told their device", 1) == world_size:
        store.set("all devices told", "")
    store.wait(["all devices told"])
    return next(n for n in count(1) if not store.check([f"devices with {n + 1} ranks"]))


def _identity(device: torch.device) -> str:
    """Return an identity of a GPU, or of a part of it (MIG), that all processes agree on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    part = visible if visible.startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(device).uuid} {part}"


def backend_for(device: torch.device, *, ranks_per_device: int = 1) -> str:
    """Name the backend for tensors on `device`: `"nccl"` or `"gloo"`.

    NCCL refuses two ranks on one GPU before 2.30, and later unless `NCCL_MULTI_RANK_GPU_ENABLE` is
    set (`initialize` sets it, this function does not). Gloo then moves CUDA tensors through the
    host. A variable that the user has set to 1 overrules the check of the version.
    """
    if device.type == "cpu" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if ranks_per_device <= 1 or nccl_shares_devices() else "gloo"


def nccl_shares_devices() -> bool:
    """Tell whether this NCCL can serve several ranks on one GPU."""
    switch = os.environ.get(_MULTI_RANK)
    return _nccl_version() >= _MULTI_RANK_SINCE if switch is None else switch == "1"


def allow_shared_devices() -> None:
    """Allow NCCL several ranks on one GPU; call this before NCCL is initialised."""
    os.environ.setdefault(_MULTI_RANK, "1")


def why_no_nccl(*, ranks_per_device: int) -> str:
    """Explain in words for a message that NCCL cannot serve GPUs with so many ranks on each."""
    if not dist.is_nccl_available():
        return "torch is built without NCCL"
    version = ".".join(map(str, _nccl_version()))
    return f"{ranks_per_device} ranks share a GPU, which NCCL ({version}) cannot serve"


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def may_mix(
    func: _internals.Operator, args: _internals.Arguments, is_there: Callable[[Tensor], bool]
) -> bool:
    """Tell whether CUDA runs an operator although some operands are on the host.

    CUDA accepts copies, indices on the host, and scalars on the host (tensors without dims) as
    operands of pointwise operators, except fused and foreach operators.

    Args:
        func: Overload of an operator.
        args: Operands of the operator.
        is_there: Function that tells whether a tensor is on the device.
    """
    name = func.name()
    if name.startswith(_COPIES):
        return True
    if name.startswith(_INDEXED):  # the list of indices may be anywhere
        args = (args[0], *args[2:])
    tensors = [x for x in _internals.tree_leaves(args) if isinstance(x, Tensor)]
    on_host = [x for x in tensors if not is_there(x)]
    if not on_host:
        return True
    takes_scalars = (torch.Tag.pointwise in func.tags and "::_f" not in name) or name.startswith(
        (*_INDEXED, *_FILLED)
    )
    writes_to_host = name.split(".")[0].endswith("_") and on_host[0] is tensors[0]
    return takes_scalars and not writes_to_host and all(x.dim() == 0 for x in on_host)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream of this thread on `device`; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make `stream` the current stream of this thread inside the context; None: change nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """Return the stream of this process for a purpose on `device`; None on a CPU.

    torch has a pool of 32 streams for a device. A new stream for every call would soon be a stream
    that NCCL, FSDP or another purpose uses too, and would wait for their work.

    Args:
        device: Device with its index.
        purpose: Purpose of the stream, such as `"read counts"`.
    """
    if device.type != "cuda":
        return None
    with _lock:
        if (device, purpose) not in _side_streams:
            _side_streams[device, purpose] = torch.cuda.Stream(device)
        return _side_streams[device, purpose]


_lock = Lock()
_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


class Event:
    """Point in the work of a stream, which a CPU has always reached."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        """Create an event for streams of `device`."""
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the end of the work that `stream` (default: the current stream) has so far."""
        if self._event is not None:
            self._event.record(stream or torch.cuda.current_stream(self._device))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make later work of `stream` (default: the current stream) wait for this point."""
        if self._event is not None:
            self._event.wait(stream or torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Tell whether the point has been reached."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block the host until the point has been reached."""
        if self._event is not None:
            self._event.synchronize()


_PIECE = 1 << 17  # elements, a MiB in float64
_SHORT = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class Lifting(TorchFunctionMode):
    """Mode in which functions of torch use float64 instead of shorter floats."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: _internals.Arguments = (),
        kwargs: _internals.Keywords | None = None,
    ) -> object:
        """Call a function of torch with float64 instead of shorter floats."""
        if func in _CASTS:
            return args[0].double()
        return func(*map(lifted, args), **{k: lifted(v) for k, v in (kwargs or {}).items()})


@contextmanager
def lifting() -> Iterator[None]:
    """Compute in float64 in this thread inside the context; see :func:`lift`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lifting():
            yield
    finally:
        torch.set_default_dtype(before)


def lift() -> None:
    """Compute in float64 from now on, in this thread.

    Autocast does not cast float64, so that it need not be disabled.
    """
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype = lambda _dtype: None
    Lifting().__enter__()  # for as long as the program runs


def lifted(value: object) -> object:
    """Return float64 for the dtype of a shorter float, and any other value as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value


def float64_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norm of each tensor, summed in float64.

    Torch reduces a tensor in a wider dtype than its own by casting all of it first, on a CPU and on
    CUDA (`make_reduction` of aten/src/ATen/native/ReduceOpsUtils.h): for gradients in float32 that
    takes twice their memory. CUDA's kernels for lists of tensors cast what they read. A CPU has no
    such kernels, so that pieces are cast there that stay in its caches.

    Args:
        tensors: Tensors of any shapes and floating dtypes on one device; no DTensors.
        norm_type: Positive p of the p-norm; `math.inf` for the largest absolute value.

    Returns:
        Scalar in fp64 for each tensor: NaN if an element is NaN, 0 for a tensor without elements.
    """
    if not tensors:
        return []
    pieces: list[Tensor] = []
    counts = []
    for x in tensors:
        count = 1
        if x.numel() > _PIECE and x.device.type == "cpu" and x.dtype != torch.float64:
            count = -(-x.numel() // _PIECE)
            pieces += x.reshape(-1).tensor_split(count)
        else:
            pieces.append(x if x.numel() or math.isfinite(norm_type) else x.new_zeros(()))
        counts.append(count)
    of_pieces = iter(torch._foreach_norm(pieces, norm_type, dtype=torch.float64))  # noqa: SLF001
    norms = []
    for count in counts:
        norm = next(of_pieces)
        if count > 1:
            parts = torch.stack([norm, *islice(of_pieces, count - 1)])
            norm = torch.linalg.vector_norm(parts, norm_type)
        norms.append(norm)
    return norms
