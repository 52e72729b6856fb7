"""Numbers that ranks exchange are read on the host with what was there before.

There is no GPU: tensors of the CPU say that they are on one, and what CUDA would be asked for is
counted by stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_expert.dispatch import exchange_plan
from hp_expert.dispatch.exchange_plan import read_counts
from hp_platform import Pending, device

GPU = torch.device("cuda", 0)


class Cuda:
    """Counts what is asked of it.

    Attributes:
        streams: How many were made.
        pinned: Likewise, pinned buffers.
        at_rest: Called where the host waits for an event.
    """

    def __init__(self) -> None:
        self.streams = self.pinned = 0
        self.at_rest: Callable[[], object] = lambda: None

    def stream(self, device: torch.device) -> str:
        """As `torch.cuda.Stream`."""
        self.streams += 1
        return f"stream {self.streams} of {device}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Stand-ins for what `read_counts` uses of CUDA."""
    found, empty = Cuda(), torch.empty

    class Event:
        def record(self, stream: object) -> None:
            assert stream is not None

        wait = record

        def synchronize(self) -> None:
            found.at_rest()

    def count_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found.pinned += pin_memory
        return empty(*args, **kwargs)

    def use(stream: object) -> AbstractContextManager[object]:
        return nullcontext(stream)

    for name, value in (("Stream", found.stream), ("Event", Event), ("stream", use)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "current")
    monkeypatch.setattr(torch, "empty", count_pinned)
    monkeypatch.setattr(Tensor, "device", GPU)
    monkeypatch.setattr(device, "_side_streams", {})
    monkeypatch.setattr(exchange_plan, "_free_pinned", [])
    yield found
    monkeypatch.undo()


def read(sent: Tensor, received: Tensor) -> None:
    """Read an exchange and look at what came."""
    mine, theirs = sent[:, :3].tolist(), received[:, :3].tolist()
    assert read_counts(sent, Pending(received), num_columns=3, purpose="a test")[1:] == (
        mine,
        theirs,
    )


def test_exchanges_one_after_the_other_share_a_stream_and_a_buffer(cuda: Cuda) -> None:
    for value in range(100):
        read(torch.full((2, 4), value), torch.full((2, 4), 100 + value))
    assert (cuda.streams, cuda.pinned) == (1, 1)


def test_a_longer_exchange_gets_a_longer_buffer_and_short_ones_share_it(cuda: Cuda) -> None:
    for rows in (2, 5000, 3, 5000):
        read(torch.ones(rows, 4, dtype=torch.int64), torch.zeros(rows, 4, dtype=torch.int64))
    assert (cuda.streams, cuda.pinned) == (1, 2)


def test_exchanges_in_flight_at_once_have_buffers_of_their_own(cuda: Cuda) -> None:
    meeting = threading.Barrier(4)
    cuda.at_rest = lambda: meeting.wait(60)  # all four have copied, and none has read
    wrong: list[BaseException] = []

    def one(value: int) -> None:
        try:
            for _ in range(5):
                read(torch.full((2, 4), value), torch.full((2, 4), -value))
        except BaseException as error:  # noqa: BLE001 # shown below
            wrong.append(error)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert (cuda.streams, cuda.pinned) == (1, 4)


def test_a_buffer_that_the_device_may_write_to_is_not_used_again(cuda: Cuda) -> None:
    def fail() -> None:
        raise RuntimeError("device lost")

    cuda.at_rest = fail
    with pytest.raises(RuntimeError, match="device lost"):
        read(torch.zeros(2, 4), torch.zeros(2, 4))
    cuda.at_rest = lambda: None
    read(torch.zeros(2, 4), torch.zeros(2, 4))
    assert cuda.pinned == 2
