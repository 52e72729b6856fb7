"""Hugging Face models cut into stages.

The tests of real models need `transformers`, which no session installs by itself
(``nox -s transformers``); a stand-in with the same structure is tested everywhere.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_schedule import MetaStep, MetaStepType, Schedule, interleaved_1f1b
from hp_schedule.runtime import (
    PipelineStage,
    SplitModel,
    defer_weight_gradients,
    from_schedule,
    split_model,
)

VOCABULARY, HIDDEN, ROWS, LENGTH = 24, 16, 4, 6


class Layer(nn.Module):
    """Stands for a decoder layer: depends on the kind of mask and on the position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor, angle: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(x * angle.cos()) * mask[..., None])
        return y


class Decoder(nn.Module):
    """Stands for `LlamaModel`: makes masks and angles from what it is given."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in config.layer_types)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor]:
        assert not use_cache
        assert attention_mask is not None
        x: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        masks = {"full": attention_mask.to(x.dtype), "sliding": 0.5 * attention_mask.to(x.dtype)}
        for kind, layer in zip(
            self.config.layer_types, self.layers[: self.config.num_hidden_layers], strict=True
        ):
            x = layer(x, masks[kind], angle)
        return (self.norm(x),)


class ForCausalLM(nn.Module):
    """Stands for `LlamaForCausalLM`."""

    def __init__(self, kinds: str, *, tied: bool) -> None:
        super().__init__()
        types = [{"f": "full", "s": "sliding"}[kind] for kind in kinds]
        self.config = SimpleNamespace(
            model_type="qwen3", num_hidden_layers=len(types), layer_types=types
        )
        self.model = Decoder(self.config)
        self.lm_head: nn.Linear | None = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def set_output_embeddings(self, head: nn.Linear | None) -> None:
        self.lm_head = head

    def forward(self, labels: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, ...]:
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(self.model(**kwargs)[0])
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def stand_in(*, tied: bool = True) -> nn.Module:
    return ForCausalLM("fsffs", tied=tied)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa")
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def qwen3() -> nn.Module:
    """Return a Qwen3 with tied embeddings and a window over the later layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **SIZES,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=3,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def others(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2)
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return make


MODELS = {
    "stand-in": stand_in,
    "llama": llama,
    "qwen3": qwen3,
    "mistral": others("Mistral"),
    "qwen2": others("Qwen2"),
}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, a mask with padding at the end of some rows, and labels."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, 4:] = mask[2, 5:] = 0
    return ids, mask, torch.randint(VOCABULARY, (ROWS, LENGTH))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("layers", [[2, 0, 3], 2, [5]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_computes(name: str, layers: int | list[int]) -> None:
    model = make_model(name)
    ids, mask, _ = batch()
    wanted = model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
    x = ids
    for stage in split_model(model, layers).modules:
        x = stage(x, attention_mask=mask)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["stand-in", "llama"])
def test_last_stage_computes_the_models_own_loss_from_labels(name: str) -> None:
    model = make_model(name)
    ids, mask, labels = batch()
    wanted = model(input_ids=ids, attention_mask=mask, use_cache=False, labels=labels)[0]
    x = ids
    for stage in split_model(model, 3).modules:
        x = stage(x, attention_mask=mask, labels=labels)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)


def test_stages_have_the_models_own_parameters_under_their_names() -> None:
    model = stand_in()
    split = split_model(model, [2, 2, 1])
    whole = dict(model.named_parameters(remove_duplicate=False))
    names = [set(stage.state_dict()) for stage in split.modules]
    assert set.union(*names) == set(model.state_dict())
    for stage in split.modules:
        for name, parameter in stage.named_parameters():
            assert parameter is whole[name]
    assert "model.layers.2.linear.weight" in names[1]
    assert "model.embed_tokens.weight" not in names[1]
    assert not names[1] & names[2]
    assert len(list(model.modules())) == len(list(stand_in().modules())), "it stays whole"


def test_tied_embeddings_are_told_as_shared_parameters() -> None:
    [shared] = split_model(stand_in(tied=True), 3).shared_parameters
    assert shared.names == {0: "model.embed_tokens.weight", 2: "lm_head.weight"}
    assert split_model(stand_in(tied=False), 3).shared_parameters == ()


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (stand_in(), [2, 2], r"layers \(\[2, 2\]\) must be >= 0 and add up to the model's \(5\)"),
        (stand_in(), [6, -1], "must be >= 0"),
        (stand_in(), 0, r"layers \(0\) must be >= 1"),
        (nn.Linear(2, 2), 2, r"type of model \(Linear\) must be one of llama, "),
        (
            stand_in().get_submodule("model"),
            2,
            r"model \(Decoder\) must be one with a language modelling",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_model(model, layers)


def pieces(split: SplitModel, schedule: Schedule, rank: int) -> Iterator[PipelineStage]:
    for index in schedule.stages_of(rank):
        yield PipelineStage(
            defer_weight_gradients(split.modules[index]),
            stage_index=index,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
        )


def train(name: str, schedule: Schedule, recompute: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = make_model(name)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable()
    split = split_model(model, schedule.num_stages)
    stages = list(pieces(split, schedule, dist.get_rank()))
    runtime = from_schedule(
        schedule, stages, loss_fn=loss_fn, shared_parameters=split.shared_parameters
    )
    ids, mask, labels = batch()
    args = (ids,) if any(stage.stage_index == 0 for stage in stages) else ()
    result = runtime.run(*args, target=labels, attention_mask=mask)
    grads: dict[str, Tensor] = {}
    for stage in stages:
        grads |= grads_of(stage.module)
    return result.losses, grads


def split_backwards(schedule: Schedule) -> Schedule:
    rows = []
    for row in schedule.steps:
        halves = [MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT]
        rows.append(
            [
                part
                for step in row
                if step is not None
                for part in (
                    [MetaStep(half, step.stage_index, step.microbatch_index) for half in halves]
                    if step.type is MetaStepType.BWD
                    else [step]
                )
            ]
        )
    return Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=schedule.num_microbatches
    )


@pytest.mark.parametrize(
    ("name", "recompute"), [("stand-in", False), ("llama", True), ("qwen3", False)]
)
def test_a_pipeline_of_the_stages_trains_like_the_model(name: str, recompute: bool) -> None:
    model = make_model(name)
    ids, mask, labels = batch()
    losses = []
    for part in range(2):
        rows = slice(2 * part, 2 * part + 2)
        logits = model(input_ids=ids[rows], attention_mask=mask[rows], use_cache=False)[0]
        loss = loss_fn(logits, labels[rows])
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    schedule = split_backwards(interleaved_1f1b(2, num_microbatches=2))
    outcomes = run_distributed(train, name, schedule, recompute, world_size=2)
    torch.testing.assert_close(outcomes[1][0], losses, rtol=1e-12, atol=1e-12)
    found = {key: grad for _, grads in outcomes for key, grad in grads.items()}
    whole = dict(model.named_parameters(remove_duplicate=False))
    assert set(found) >= set(grads_of(model))
    for key, grad in found.items():
        torch.testing.assert_close(grad, whole[key].grad, rtol=1e-12, atol=1e-12)
