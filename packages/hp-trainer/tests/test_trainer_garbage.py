"""When Python's garbage collector runs during training."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from hp_trainer.training.train import garbage_collection


class Ring:
    """An object that only the collector can free."""

    def __init__(self, freed: list[int], number: int) -> None:
        self.freed, self.number, self.itself = freed, number, self

    def __del__(self) -> None:
        self.freed.append(self.number)


@pytest.fixture
def runs() -> Iterator[list[str]]:
    """Starts of the collector."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        del info
        if phase == "start":
            seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_garbage_is_collected_after_the_steps_that_say_so(runs: list[str]) -> None:
    freed: list[int] = []
    with garbage_collection(every=3) as collect_after:
        runs.clear()
        for step in range(1, 8):
            Ring(freed, step)
            _ = [[i] for i in range(5000)]  # enough for the collector to come by itself
            collect_after(step)
        assert len(runs) == 2
        assert sorted(freed) == [1, 2, 3, 4, 5, 6]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_zero_leaves_it_to_python(runs: list[str]) -> None:
    with garbage_collection(every=0) as collect_after:
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        collect_after(1)
    assert runs == []


def test_an_error_gives_it_back_to_python() -> None:
    with pytest.raises(ZeroDivisionError), garbage_collection(every=1):
        raise ZeroDivisionError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
