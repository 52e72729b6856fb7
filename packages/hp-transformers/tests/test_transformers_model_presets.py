"""Shipped configs of published models have as many parameters as those."""

from math import prod

import pytest
from msgspec.structs import replace

from hp_trainer.config.options import resolve, shipped
from hp_trainer.model.transformer import count_parameters, model_shapes
from hp_transformers.families import hf_config, model_config

# What the model cards or the indices of the published files say, parameter for parameter.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,  # meta-llama/Llama-3.1-8B
    "llama-3.1-70b": 70_553_706_496,  # meta-llama/Llama-3.1-70B
    "qwen3-0.6b": 596_049_920,  # Qwen/Qwen3-0.6B, the embedding counted once
    "qwen3-8b": 8_190_735_360,  # Qwen/Qwen3-8B
    "qwen3-30b-a3b": 30_532_122_624,  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": 235_093_634_560,  # Qwen/Qwen3-235B-A22B
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x22b": 140_620_634_112,  # mistralai/Mixtral-8x22B-v0.1
    "gpt-oss-20b": 20_914_757_184,  # openai/gpt-oss-20b
    "gpt-oss-120b": 116_829_156_672,  # openai/gpt-oss-120b
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_the_published_model(name: str) -> None:
    assert count_parameters(resolve(name, env={}).config.model) == PUBLISHED[name]


def test_deepseek_has_as_many_parameters_as_published_and_a_module_of_prediction() -> None:
    # deepseek-ai/DeepSeek-V3-Base: 671 B of the main model, correction biases counted, and 14 B of
    # the module, in which the files repeat the embedding and the output matrix.
    model = resolve("deepseek-v3", env={}).config.model
    sizes = {name: prod(shape) for name, shape in model_shapes(model).items()}
    ahead = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert sum(sizes.values()) - ahead == 671_026_419_200
    assert 13e9 < ahead + 2 * model.vocab_size * model.dim < 14e9


@pytest.mark.parametrize("name", shipped())
def test_a_preset_is_a_model_that_hugging_face_has(name: str) -> None:
    config = resolve(name, env={}).config
    model = replace(config.model, vocab_size=config.model.vocab_size or 257, max_positions=4096)
    read = model_config(hf_config(model, dtype="float32"))
    free = {key: getattr(model, key) for key in ("correction_rate", "mtp_weight", "init_std")}
    assert hf_config(read, dtype="float32") == hf_config(model, dtype="float32")
    assert model_shapes(read) == model_shapes(replace(model, **free))
