"""Generators of a dry device, which draw no numbers but have a state."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from hp_dry._internals import change
from hp_dry.recording.recorder import DeviceRecorder

_PlainGenerator: Any = torch.Generator


_Meta: Any = type(_PlainGenerator)  # not the same in all versions


class _AnyGenerator(_Meta):  # type: ignore[misc]
    def __instancecheck__(self, x: object) -> bool:
        return isinstance(x, _PlainGenerator)


class Generator(_PlainGenerator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """Generator of the host, or a generator that reports the dry device."""

    _of: torch.device | None

    def __new__(cls, device: torch.device | str | int = "cpu") -> Self:
        """Make a generator of a device."""
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        new: Self = super().__new__(cls, "cpu")
        new._of = None if asked.type == "cpu" else asked
        return new

    @property
    def device(self) -> torch.device:
        """Return the device for which it draws numbers."""
        return self._of or torch.device("cpu")

    def get_state(self) -> Tensor:
        """Return the seed and the number of draws, as bytes."""
        mine: Tensor = super().get_state()
        return mine if self._of is None else _state(self.initial_seed())

    def set_state(self, state: Tensor) -> object:
        """Continue from a state."""
        if self._of is None:
            return super().set_state(state)
        return self.manual_seed(int(state.view(torch.int64)[0]))


def _state(seed: int) -> Tensor:
    """Return the state of Philox: a seed and an offset, 8 bytes each."""
    return torch.tensor([seed % (1 << 63), 0], device="cpu").view(torch.uint8)


def enter_stand_ins(stack: ExitStack, device: DeviceRecorder) -> None:
    """Give `torch.cuda` and `torch.Generator` the device's generators until `stack` is closed."""
    generators = [Generator("cuda") for _ in range(device.gpu.num_devices)]

    def of(x: torch.device | str | int) -> Generator:
        index = x if isinstance(x, int) else torch.device(x).index
        return generators[device.thread.index if index is None or index < 0 else index]

    def seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(int(seed))

    def set_all(states: Iterable[Tensor]) -> None:
        for each, state in zip(generators, states, strict=False):
            each.set_state(state)

    change(stack, torch, Generator=Generator)
    change(
        stack,
        torch.cuda,
        default_generators=tuple(generators),
        get_rng_state=lambda x="cuda": of(x).get_state(),
        get_rng_state_all=lambda: [each.get_state() for each in generators],
        set_rng_state=lambda state, x="cuda": of(x).set_state(state) and None,
        set_rng_state_all=set_all,
        manual_seed=lambda seed: of("cuda").manual_seed(int(seed)) and None,
        manual_seed_all=seed_all,
        initial_seed=lambda: of("cuda").initial_seed(),
        seed=lambda: of("cuda").seed() and None,
        seed_all=lambda: seed_all(torch.seed()),
    )
