"""Peak bytes of a dry run are those of a real run of the same program on the CPU, within 3 %."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from hp_dry import DryDevice
from integration_tests.layouts.dry_memory import (
    FSDP,
    LAYOUTS,
    PLAIN,
    dry_fsdp,
    dry_layout,
    real_fsdp,
    real_layout,
    real_peaks,
    tracked_fsdp,
    train_plain,
)

_BOUND = 0.03
_FSDP_RANKS = 4

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.mark.sample("fused AdamW", "checkpointed")
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_needs_what_it_really_needs(name: str) -> None:
    torch.set_num_threads(1)
    real = max(real_peaks(partial(train_plain, name, "cpu")))
    with DryDevice() as device:
        train_plain(name, "cuda")
    _compare(name, [device.storages.peak_bytes], [real])


@pytest.mark.sample
@pytest.mark.parametrize("name", FSDP)
def test_fsdp_needs_what_it_really_needs_and_what_its_tracker_finds(name: str) -> None:
    dry = dry_fsdp(name, _FSDP_RANKS)
    _compare(name, [dry], [real_fsdp(name, _FSDP_RANKS)])
    _compare(f"{name}, FSDPMemTracker", [dry], [tracked_fsdp(name, _FSDP_RANKS)])


@pytest.mark.sample("pp 2, 1f1b")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_needs_what_it_really_needs(name: str) -> None:
    dry, real = dry_layout(name), real_layout(name)
    # Ranks that do the same need the same: what Gloo holds on to is not the same on all of them.
    alike = [
        [b for other, b in zip(dry, real, strict=True) if abs(other / a - 1) < 1e-3] for a in dry
    ]
    _compare(name, dry, [min(numbers) for numbers in alike])


def _compare(name: str, dry: list[int], real: list[int]) -> None:
    ratios = [a / b for a, b in zip(dry, real, strict=True)]
    shown = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    sys.stdout.write(f"{name}: dry {dry}, real {real}, {shown}\n")
    assert all(abs(ratio - 1) <= _BOUND for ratio in ratios)
