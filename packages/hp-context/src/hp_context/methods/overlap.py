"""Rates by which overlap is decided, and counters of exchanges that overlapped."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Fallback(StrEnum):
    """The reason why a q, k or v was exchanged synchronously."""

    FIRST_CALL = "first call with this shape"  # ranks compare shapes before anything is launched
    COST = "does not pay"  # overlap="auto" and `OverlapRates.pays` says no
    REPLACED = "another tensor"  # never launched: made after the projection, or by recompute
    WRITTEN = "written in place"
    TAKEN = "taken before"  # by an earlier attention, such as the one that is recomputed
    REDIRECTED = "gradient cut or begun"  # requires_grad changed since the launch
    OTHER = "launched for another exchange"  # another group, layout or number of query heads
    INFERENCE = "inference tensor"  # does not tell of writes in place


@dataclass(frozen=True, slots=True)
class OverlapRates:
    """Rates by which `overlap="auto"` decides; the same on all ranks, or they would hang.

    While an exchange of b bytes runs behind a projection of f floating-point operations, at most
    `min(b / link, f / compute)` seconds of it are hidden. Overlap pays if that is more than
    `overhead`, which stands for the launch, the wait, and the compute units that the exchange
    takes away.

    Attributes:
        link: Bytes per second that a rank sends to the others.
        compute: Floating-point operations per second of the projections and of attention.
        overhead: Seconds.
    """

    link: float
    compute: float
    overhead: float

    def __post_init__(self) -> None:
        for name in ("link", "compute"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be > 0")
        if self.overhead < 0:
            raise ValueError(f"overhead ({self.overhead}) must be >= 0")

    def pays(self, num_bytes: float, flops: float) -> bool:
        """Tell whether launching an exchange early gains more than it costs.

        Args:
            num_bytes: Bytes that this rank sends to others.
            flops: Floating-point operations of the projection behind which it may hide.
        """
        return min(num_bytes / self.link, flops / self.compute) > self.overhead

    def strides(self, num_bytes: float, flops: float, most: int) -> int:
        """Return the best number of strides in which keys are gathered, 1 to `most`.

        Of n strides each but the first is gathered while the one before it is computed, and each
        costs `overhead`.

        Args:
            num_bytes: Bytes that a rank sends to others, all strides together.
            flops: Floating-point operations of its attention.
            most: Strides at most.
        """
        transfer, compute = num_bytes / self.link, flops / self.compute

        def seconds(n: int) -> float:
            return (transfer + compute + (n - 1) * max(transfer, compute)) / n + n * self.overhead

        return min(range(1, most + 1), key=seconds)


# Orders of magnitude of one machine of its kind; measure and pass your own.
_DEFAULT_RATES = {
    "cpu": OverlapRates(link=1e9, compute=5e10, overhead=3e-4),
    "cuda": OverlapRates(link=5e10, compute=4e14, overhead=5e-5),
}


# Where overlap is asked for whatever it costs.
FREE = OverlapRates(link=1.0, compute=1.0, overhead=0.0)


def default_rates(device_type: str) -> OverlapRates:
    """Return rates of a kind of device; those of CUDA for kinds that are not known."""
    return _DEFAULT_RATES.get(device_type, _DEFAULT_RATES["cuda"])


@dataclass(frozen=True, slots=True)
class OverlapCounts:
    """Exchanges of q, k and v in forward up to a moment, recomputation included.

    Attributes:
        launched: Exchanges that were started where the tensor was made.
        overlapped: Launched exchanges whose result an attention took.
        fallbacks: Number of synchronous exchanges, by reason.
    """

    launched: int = 0
    overlapped: int = 0
    fallbacks: Mapping[Fallback, int] = field(default_factory=lambda: MappingProxyType({}))


class Tally:
    """Counters that several threads may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched = 0
        self._arrived: Counter[Fallback | None] = Counter()

    def launched(self) -> None:
        """Count one launch."""
        with self._lock:
            self._launched += 1

    def arrived(self, reason: Fallback | None) -> None:
        """Count one exchange that reached attention: overlapped, or not for a reason."""
        with self._lock:
            self._arrived[reason] += 1

    def read(self) -> OverlapCounts:
        """Return the counts of now."""
        with self._lock:
            fallbacks = {reason: n for reason, n in self._arrived.items() if reason is not None}
            return OverlapCounts(self._launched, self._arrived[None], MappingProxyType(fallbacks))
