"""What mixes positions besides attention is found by trying a model, and named; nothing else is.

The models here are called as those of transformers are; real ones are in
`test_context_transformers_mixers.py`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_context.hugging_face.mixers import current_trial, find_mixer

WIDTH, HEADS, LAYERS = 16, 4, 2


class Mixer(nn.Module):
    """A work on [B, S, D]."""

    def __init__(self, work: Callable[[Tensor, Any], Tensor], **told: Any) -> None:
        super().__init__()
        self.work, self.told = work, told
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x, self.linear)


class Attention(nn.Module):
    """Grouped heads through the registered attention, which is the trial's here."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
        self.told = told

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        q = q * positions[:, None, :, None].cos()
        trial = current_trial()
        assert trial is not None
        out, _ = trial.attend(q, k, v, self.told)
        return out.flatten(2)


class Experts(nn.Module):
    """Sorts tokens by expert, so that each has another number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(tokens[chosen == number])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module | None, told: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention(**told)
        self.drop = nn.Dropout(0.5)
        self.experts = Experts()
        self.mixer = mixer

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), positions)
        x = x + self.drop(self.experts(x))
        return x + (torch.zeros_like(x) if self.mixer is None else self.mixer(x))


class Model(nn.Module):
    def __init__(
        self, mixer: nn.Module | None = None, *, counts: bool = False, **told: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts = counts
        self.config = SimpleNamespace(max_position_embeddings=64)
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(
            Layer(mixer if number == LAYERS - 1 else None, told) for number in range(LAYERS)
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        if self.counts:
            position_ids = torch.arange(input_ids.size(1)).expand_as(input_ids)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return {"logits": x}


class Conv(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, size, padding=size - 1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.mT)
        return out[..., : x.size(1)].mT


def scan(x: Tensor, linear: Any) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for column in linear(x).unbind(1):
        state = 0.9 * state + column
        out.append(state)
    return torch.stack(out, 1)


MIXERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "sum so far": lambda x, linear: linear(x).cumsum(1),
    "scan": scan,
    # The part that a submodule sees is mixed already.
    "shift before": lambda x, linear: linear(torch.roll(x, 1, 1)),
    "shift after": lambda x, linear: F.pad(linear(x), (0, 0, 1, 0))[:, :-1],
    "mean": lambda x, linear: linear(x) + x.mean(1, keepdim=True),
    "softmax over the sequence": lambda x, linear: linear(x).softmax(1),
    "blocks": lambda x, linear: F.avg_pool1d(linear(x).mT, 30, 1, 15)[..., : x.size(1)].mT,
    "own attention": lambda x, linear: (linear(x) @ x.mT).softmax(-1) @ x,
    "own places": lambda x, linear: linear(x) + torch.arange(x.size(1))[:, None].sin(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_whose_attention_alone_mixes_is_good(dtype: torch.dtype) -> None:
    model = Model(Mixer(lambda x, linear: linear(x).tanh())).to(dtype).train()
    modes = [module.training for module in model.modules()]
    before, drawn = model.state_dict(), torch.random.get_rng_state()
    assert find_mixer(model) is None
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert current_trial() is None


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_mixes_positions_is_named(name: str, dtype: torch.dtype) -> None:
    found = find_mixer(Model(Mixer(MIXERS[name])).to(dtype))
    assert found is not None
    assert found.startswith(f"layers.{LAYERS - 1}.mixer (Mixer) computes for a token what")


def test_a_convolution_is_named_and_one_of_a_single_place_is_not() -> None:
    found = find_mixer(Model(Conv(4)))
    assert found is not None
    assert found.startswith("layers.1.mixer (Conv) computes")
    assert find_mixer(Model(Conv(1))) is None


def test_positions_that_a_model_counts_itself_are_found() -> None:
    found = find_mixer(Model(counts=True))
    assert found is not None
    assert found.startswith("layers.0.attention (Attention) computes")


def test_what_attention_is_asked_for_and_does_not_compute_is_named() -> None:
    assert find_mixer(Model(use_cache=False, block_indices=None)) is None
    found = find_mixer(Model(block_indices=torch.zeros(1)))
    assert found == "layers.0.attention (Attention) asks its attention for block_indices"


def test_a_model_that_cannot_be_tried_is_refused() -> None:
    def broken(_: Tensor, __: Any) -> Tensor:
        raise KeyError("what")

    with pytest.raises(ValueError, match=r"Model must run on tokens alone .* KeyError: 'what'"):
        find_mixer(Model(Mixer(broken)))
    assert current_trial() is None
