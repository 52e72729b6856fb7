"""Steps that are skipped, counted in a row and in all."""

import pytest

from hp_base.errors import NumericsError
from hp_trainer.config import TrainConfig
from hp_trainer.training.gradients import Skips

SKIPPING = TrainConfig(not_finite="skip", max_skipped_steps=2)


def test_only_steps_in_a_row_end_a_run() -> None:
    skips = Skips()
    for _ in range(5):
        skips.add("a problem", SKIPPING)
        skips.done()
    assert (skips.total, skips.in_a_row) == (5, 0)


def test_one_more_in_a_row_than_allowed_ends_a_run() -> None:
    skips = Skips()
    skips.add("a problem", SKIPPING)
    skips.add("a problem", SKIPPING)
    with pytest.raises(NumericsError, match=r"^a problem, after 2 skipped steps in a row$"):
        skips.add("a problem", SKIPPING)


def test_a_run_that_is_to_stop_skips_nothing() -> None:
    skips = Skips()
    with pytest.raises(NumericsError, match=r"^a problem$"):
        skips.add("a problem", TrainConfig(not_finite="stop"))
    assert skips.total == 0
