"""Seconds of the kernels of a stage: rooflines, and the host that launches them. No torch."""

from collections import Counter
from functools import lru_cache
from typing import Final, NamedTuple

from hp_plan.costs.machine import Machine
from hp_plan.costs.work import Kernel, Kernels
from hp_trainer.layout.ranks import StageLayout


class Compute(NamedTuple):
    """Seconds that a stage computes for a microbatch, if it never waits for others.

    Attributes:
        forward: Seconds of forward.
        input_grad: Seconds of the backward of activations, for which other stages wait.
        weight_grad: Seconds of the rest of backward.
        again: Seconds of forwards that backward runs again.
        device: Seconds that the device is busy with all of it.
        host: Seconds that the host takes to launch all of it.
    """

    forward: float
    input_grad: float
    weight_grad: float
    again: float
    device: float
    host: float


class Routed(NamedTuple):
    """Rows of experts of the busiest rank, divided by those of an even routing.

    Attributes:
        load: Ratio of the rows that its experts compute.
        padded: Ratio of the rows in its buffers, see `mesh.ep_buffer`.
    """

    load: float = 1.0
    padded: float = 1.0


EVEN: Final = Routed()


class _Busy(NamedTuple):
    """Seconds for which a part of a step keeps the device and the host busy."""

    device: float
    host: float


class Rates:
    """Prices of kernels, by a roofline.

    A kernel takes as long as its products at the rate of their kind, or its bytes at the rate of
    memory, whichever is longer. A part of a step takes as long as its kernels, or as the host needs
    to launch them.

    Args:
        machine: Rates of the machine.
        is_compiled: Whether kernels other than products are fused.
        slowed: Factor by which ranks that share a device are slower.
    """

    def __init__(self, machine: Machine, *, is_compiled: bool, slowed: float) -> None:
        self._machine, self._slowed = machine, slowed
        self._left = machine.compiled if is_compiled else 1.0
        self._known: dict[object, tuple[Counter[Kernel], _Busy]] = {}
        self._flops = {
            "product": machine.flops,
            "grouped": machine.grouped_flops or machine.flops,
            "attention": machine.attention_flops or machine.flops,
            "memory": machine.flops,
        }

    def compute(
        self, kernels: Kernels, tokens: float, place: StageLayout, *, routed: Routed = EVEN
    ) -> Compute:
        """Price a stage.

        Args:
            kernels: Kernels of the stage.
            tokens: Tokens of a microbatch on a rank.
            place: Ranks that share its weights.
            routed: Rows of the busiest rank's experts.
        """
        shared = place.tp, place.ep * place.etp
        parts = [self._seconds(way, tokens, *shared, routed=routed) for way in kernels]
        forward, backward, again = (self._slowed * max(part) for part in parts)
        # Each product of forward has one for the input and one for the weight in backward.
        device, host = (self._slowed * sum(ends) for ends in zip(*parts, strict=True))
        return Compute(forward, backward / 2, backward / 2, again, device, host)

    def _seconds(
        self, kernels: Counter[Kernel], tokens: float, dense: int, experts: int, *, routed: Routed
    ) -> "_Busy":
        """Price kernels; `dense` and `experts` ranks share weights of both kinds.

        Kernels of experts move whole buffers, and multiply rows.
        """
        key = (id(kernels), tokens, dense, experts, routed)
        known = self._known.get(key)
        if known is not None:
            return known[1]
        device = launches = 0.0
        for kernel, times in kernels.items():
            left = self._left if kernel.kind == "memory" else 1.0
            ranks, rows, buffered = dense, tokens, tokens
            if kernel.is_expert:
                ranks, rows = experts, tokens * routed.load
                buffered = tokens * max(routed)
            moved = left * (kernel.bytes * buffered + kernel.fixed_bytes / ranks)
            busy = max(
                kernel.flops * rows / self._flops[kernel.kind],
                moved / self._machine.memory_bandwidth,
            )
            device += times * busy
            # Products of experts one by one are shared out as these are.
            split = experts if kernel.is_expert and kernel.kind == "product" else 1
            launched = kernel.launches / split + kernel.launches_per_token * tokens
            launches += times * left * launched
        found = _Busy(device, launches * self._machine.launch_seconds)
        self._known[key] = kernels, found  # kept alive, so that no id is used twice
        return found


@lru_cache(maxsize=8)
def rates_of(machine: Machine, *, is_compiled: bool, slowed: float) -> Rates:
    """Return rates that cache their prices, since thousands of layouts ask for the same."""
    return Rates(machine, is_compiled=is_compiled, slowed=slowed)
