"""Rotary position embedding and its variants against plain formulas."""

import cmath
import math

import pytest
import torch

from hp_trainer.config import ModelConfig
from hp_trainer.model.rotary import inverse_frequencies, rotation, softmax_growth

THETA, WIDTH, ORIGINAL, FACTOR = 1000.0, 16, 64, 4.0
PLAIN: list[float] = [THETA ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]


def _config(**settings: object) -> ModelConfig:
    given = {"head_dim": WIDTH, "rope_theta": THETA, "rope_original_positions": ORIGINAL}
    return ModelConfig(**(given | settings))  # type: ignore[arg-type]


def _llama3(frequency: float) -> float:
    """The three cases of Meta's code, by wavelength."""
    wavelength, low, high = 2 * math.pi / frequency, 1.0, 4.0
    if wavelength < ORIGINAL / high:
        return frequency
    if wavelength > ORIGINAL / low:
        return frequency / FACTOR
    smooth = (ORIGINAL / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / FACTOR + smooth * frequency


def _yarn(channel: int, *, truncate: bool) -> float:
    """A ramp between the channels that turn 32 times and once in the original length."""

    def channel_of(turns: float) -> float:
        return WIDTH * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = channel_of(32), channel_of(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, WIDTH - 1)
    share = min(max((channel - low) / (high - low), 0), 1)
    return PLAIN[channel] * (1 - share) + PLAIN[channel] / FACTOR * share


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PLAIN),
        ({"rope_scaling": "llama3", "rope_factor": FACTOR}, [_llama3(f) for f in PLAIN]),
        (
            {"rope_scaling": "yarn", "rope_factor": FACTOR},
            [_yarn(i, truncate=True) for i in range(WIDTH // 2)],
        ),
        (
            {"rope_scaling": "yarn", "rope_factor": FACTOR, "rope_truncate": False},
            [_yarn(i, truncate=False) for i in range(WIDTH // 2)],
        ),
    ],
    ids=["none", "llama3", "yarn", "yarn-not-truncated"],
)
def test_frequencies_are_those_of_the_formula(
    settings: dict[str, object], expected: list[float]
) -> None:
    found = inverse_frequencies(_config(**settings)).tolist()
    assert found == pytest.approx(expected, rel=1e-14)
    # What is stretched at all is stretched between not and fully.
    for share, plain in zip(found, PLAIN, strict=True):
        assert plain / FACTOR * (1 - 1e-12) <= share <= plain * (1 + 1e-12)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_pair_is_turned_like_a_complex_number(pairs: str) -> None:
    turn = rotation(_config(rope_pairs=pairs), torch.tensor([5]))
    x = torch.randn(1, 1, 1, WIDTH, dtype=torch.float64)
    y = turn.apply(x)[0].flatten().tolist()
    values = x.flatten().tolist()
    for i, frequency in enumerate(PLAIN):
        one, other = (i, i + WIDTH // 2) if pairs == "halves" else (2 * i, 2 * i + 1)
        turned = complex(values[one], values[other]) * cmath.exp(5j * frequency)
        assert y[one] == pytest.approx(turned.real, abs=1e-14)
        assert y[other] == pytest.approx(turned.imag, abs=1e-14)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotation_depends_on_the_distance_of_positions_alone(pairs: str) -> None:
    turn = rotation(_config(rope_pairs=pairs), torch.arange(12))
    heads = torch.randn(2, 1, 1, 1, WIDTH, dtype=torch.float64).expand(2, 1, 12, 1, WIDTH)
    at = [turned[0, :, 0] for turned in turn.apply(*heads)]
    scores = at[0] @ at[1].T
    assert torch.allclose(scores.diagonal(3), scores[0, 3].expand(9), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("width", "first"), [(WIDTH + 8, 8), (WIDTH + 8, 7), (WIDTH + 9, 9)])
def test_a_part_of_the_channels_turns_as_a_copy_of_it(width: int, first: int) -> None:
    turn = rotation(_config(rope_pairs="neighbours"), torch.arange(12))
    heads = torch.randn(2, 12, 3, width, requires_grad=True)
    part = heads[..., first : first + WIDTH]
    copy = part.detach().clone().requires_grad_()
    turned, expected = turn.apply(part)[0], turn.apply(copy)[0]
    assert torch.equal(turned, expected)
    grads = torch.randn(2, 12, 3, width)
    turned.backward(grads[..., first : first + WIDTH])
    expected.backward(grads[..., first : first + WIDTH].contiguous())
    assert heads.grad is not None
    assert copy.grad is not None
    assert torch.equal(heads.grad[..., first : first + WIDTH], copy.grad)


def test_positions_of_a_part_of_a_sequence_turn_as_in_the_whole() -> None:
    whole = rotation(_config(), torch.arange(12))
    part = rotation(_config(), torch.tensor([7, 3]))
    assert torch.equal(part.cos, whole.cos[[7, 3]])
    assert torch.equal(part.sin, whole.sin[[7, 3]])


@pytest.mark.parametrize(
    ("mscale", "whole", "turned", "scores"),
    [
        (0.0, 0.0, 0.1 * math.log(FACTOR) + 1, 1.0),
        (1.0, 1.0, 1.0, (0.1 * math.log(FACTOR) + 1) ** 2),
        (
            1.0,
            0.7,
            (0.1 * math.log(FACTOR) + 1) / (0.07 * math.log(FACTOR) + 1),
            (0.07 * math.log(FACTOR) + 1) ** 2,
        ),
    ],
)
def test_yarn_makes_scores_grow_in_one_place_or_the_other(
    mscale: float, whole: float, turned: float, scores: float
) -> None:
    config = _config(
        rope_scaling="yarn",
        rope_factor=FACTOR,
        rope_mscale=mscale,
        rope_mscale_all_dim=whole,
    )
    cos, sin, _ = rotation(config, torch.arange(3))
    assert torch.hypot(cos, sin).flatten().tolist() == pytest.approx([turned] * cos.numel())
    assert softmax_growth(config) == pytest.approx(scores)


def test_one_token_turns_wherever_its_channels_begin() -> None:
    turn = rotation(_config(rope_pairs="neighbours"), torch.tensor([3]))
    for more in (3, 4):
        part = torch.randn(1, 1, 1, WIDTH + more, dtype=torch.float64)[..., more:]
        assert torch.equal(turn.apply(part)[0], turn.apply(part.clone())[0])
