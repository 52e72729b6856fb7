"""Models of every family give what transformers' own give, and their files read and write alike.

The tests need `transformers`, which no session installs by itself (`nox -s transformers`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_platform.testing import compare
from hp_train.cli import main
from hp_trainer.config import ModelConfig
from hp_trainer.model import Microbatch, TransformerStage, look_ahead
from hp_transformers.families import load_weights, model_config, read_config, save_weights

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_local_experts": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
# Each case: the class in transformers, and what its configuration is given.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"rope_parameters": LLAMA3}),
    "llama-biased": ("Llama", SIZES | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 6}),
    "qwen3-moe": ("Qwen3Moe", SIZES | MOE | {"head_dim": 6, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("Qwen3Moe", SIZES | MOE | {"mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "sliding_window": 5}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 8}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "tie_word_embeddings": True}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "gpt-oss": (
        "GptOss",
        SIZES
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
        | {"swiglu_limit": 0.05, "rope_parameters": YARN | {"truncate": False}},
    ),
}
LENGTH = 12


class _WithoutFp32(TorchFunctionMode):
    """Makes fp64 of every fp32 that a model of transformers casts to, so that it is fp64 wholly."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def _only(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype == torch.float64:
            with _WithoutFp32():
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(before)


def _theirs(case: str, dtype: torch.dtype) -> nn.Module:
    """A tiny random model of transformers, with weights large enough that everything matters."""
    name, settings = MODELS[case]
    config = getattr(transformers, f"{name}Config")(
        **settings, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(0)
    with _only(dtype):
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def _ours(model: ModelConfig, dtype: torch.dtype) -> TransformerStage:
    with torch.device("meta"):
        layers = range(model.num_layers)
        stage = TransformerStage(
            model, model.vocab_size, layers=layers, first=True, last=True, compute_dtype=dtype
        )
    return stage.to(dtype).to_empty(device="cpu")


def _tensors(stage: nn.Module) -> dict[str, Tensor]:
    named = [*stage.named_parameters(), *stage.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _gradients_in_files(model: Any, folder: Path, ours: TransformerStage) -> dict[str, Tensor]:
    """Gradients of theirs, by our names: written in place of the weights, and read as those are."""
    with torch.no_grad():
        for parameter in model.parameters():
            zero = torch.zeros_like(parameter)
            parameter.copy_(zero if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    found = {n: torch.empty_like(t) for n, t in _tensors(ours).items()}
    load_weights(folder, found)
    return {n: found[n] for n, p in ours.named_parameters()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", MODELS)
def test_logits_and_gradients_equal_transformers(
    case: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    theirs: Any = _theirs(case, dtype)
    theirs.save_pretrained(tmp_path / "weights")
    ours = _ours(model_config(read_config(tmp_path / "weights")), dtype)
    load_weights(tmp_path / "weights", _tensors(ours))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 48, (2, LENGTH), generator=generator)
    factor = torch.randn(2, LENGTH, 48, generator=generator, dtype=dtype)
    with _only(dtype):
        expected = theirs(tokens, use_cache=False).logits
        (expected * factor).sum().backward()
    actual = ours(tokens, microbatch=Microbatch(2))
    (actual * factor).sum().backward()
    logits = compare({"logits": actual.detach()}, {"logits": expected.detach()}, bound=bound)
    assert logits.ok, logits
    wanted = _gradients_in_files(theirs, tmp_path / "gradients", ours)
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    comparison = compare(grads, wanted, bound=10 * bound)
    assert comparison.ok, comparison


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", MODELS)
def test_what_is_imported_and_exported_is_bit_equal(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs: Any = _theirs(case, dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_config(read_config(tmp_path / "theirs"))
    first = _ours(model, torch.float32)
    load_weights(tmp_path / "theirs", _tensors(first))
    save_weights(tmp_path / "ours", _tensors(first), model, dtype=dtype, shard_bytes=4000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert model_config(read_config(tmp_path / "ours")) == model
    second = _ours(model, torch.float32)
    load_weights(tmp_path / "ours", _tensors(second))
    comparison = compare(_tensors(second), _tensors(first))
    assert comparison.ok, comparison
    # And transformers reads the very bits that it wrote.
    name, _ = MODELS[case]
    kind = getattr(transformers, f"{name}ForCausalLM")
    again, info = kind.from_pretrained(tmp_path / "ours", dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    reread = compare(dict(again.state_dict()), dict(theirs.state_dict()))
    assert reread.ok, reread


def test_the_stacks_of_a_live_model_are_read(tmp_path: Path) -> None:
    theirs: Any = _theirs("qwen3-moe", torch.float32)
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = json.dumps(sorted(theirs.state_dict()))
    assert "gate_up_proj" in names
    model = model_config(read_config(tmp_path / "single"))
    found = []
    for form in ("single", "stacked"):
        stage = _ours(model, torch.float32)
        load_weights(tmp_path / form, _tensors(stage))
        found.append(_tensors(stage))
    comparison = compare(found[0], found[1])
    assert comparison.ok, comparison


def _their_prediction(
    theirs: Any, tokens: Tensor, targets: Tensor, num_modules: int
) -> tuple[nn.Module, Tensor]:
    """The modules of transformers, driven as its training would, and the mean of their losses."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    with _only(torch.float64):
        mtp = modeling_layers.MtpModel(theirs, num_modules).to(torch.float64)
        with torch.no_grad():
            for name, parameter in mtp.named_parameters():
                if name.startswith("layers."):
                    parameter.normal_(0, 0.2)
            for name, buffer in mtp.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
        hidden = theirs.model(tokens, use_cache=False).last_hidden_state
        embedded = theirs.model.embed_tokens(tokens)
        total = hidden.new_zeros(())
        for depth, layer in enumerate(mtp.layers, start=1):
            span = LENGTH - depth
            positions = torch.arange(span)[None]
            triangle = torch.full((span, span), -torch.inf).triu(1)
            hidden = layer(
                inputs_embeds=embedded[:, depth:],
                previous_hidden_state=hidden[:, :span],
                position_embeddings=theirs.model.rotary_emb(hidden, positions),
                attention_mask=triangle[None, None],
                position_ids=positions,
                past_key_values=None,
            )
            logits = theirs.lm_head(hidden).flatten(0, 1)
            total = total + nn.functional.cross_entropy(logits, targets[:, depth:].flatten())
    return mtp, total / num_modules


def _with_modules(theirs: Any, mtp: nn.Module) -> dict[str, Tensor]:
    """Weights of both under published names, experts stacked as live models have them."""
    found = dict(theirs.state_dict())
    first = theirs.config.num_hidden_layers
    for name, tensor in mtp.state_dict().items():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            found[f"model.layers.{first + int(index)}.{rest}"] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("num_modules", [1, 2])
def test_multi_token_prediction_equals_transformers(num_modules: int, tmp_path: Path) -> None:
    theirs: Any = _theirs("deepseek-v3", torch.float64)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 48, (2, LENGTH + 1), generator=generator)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    mtp, expected = _their_prediction(theirs, tokens, targets, num_modules)
    expected.backward()
    settings = theirs.config.to_dict() | {"num_nextn_predict_layers": num_modules}
    settings["num_mtp_layers"] = num_modules
    for folder in (tmp_path / "weights", tmp_path / "gradients"):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings, default=str))
    save_file(_with_modules(theirs, mtp), tmp_path / "weights" / "model.safetensors")
    ours = _ours(model_config(read_config(tmp_path / "weights")), torch.float64)
    load_weights(tmp_path / "weights", _tensors(ours))
    counts = tuple(2 * (LENGTH - depth) for depth in range(1, num_modules + 1))
    microbatch = Microbatch(2, ahead=look_ahead(tokens, targets, counts))
    ours(tokens, microbatch=microbatch).mul(0).sum().backward()
    total = float(torch.stack(microbatch.prediction_losses).sum())
    assert total == pytest.approx(expected.item(), rel=1e-12)
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *mtp.parameters()):
            if parameter.grad is not None:
                parameter.copy_(parameter.grad * 0.3)
                parameter.grad = None
            elif not parameter.requires_grad:
                parameter.zero_()
    save_file(_with_modules(theirs, mtp), tmp_path / "gradients" / "model.safetensors")
    wanted = {n: torch.empty_like(t) for n, t in _tensors(ours).items()}
    load_weights(tmp_path / "gradients", wanted)
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    comparison = compare(grads, {n: wanted[n] for n in grads}, bound=1e-11)
    assert comparison.ok, comparison


def test_what_the_quickstart_trains_is_a_model_of_transformers(tmp_path: Path) -> None:
    keys = {
        "run.output_dir": tmp_path,
        "run.name": "run",
        "train.steps": 2,
        "train.sample_tokens": 0,
        "train.eval_every": 0,
    }
    command = [sys.executable, "-m", "hp_train", "train", *(f"--{k}={v}" for k, v in keys.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "exported"
    assert main(["export-hf", str(tmp_path / "run"), str(folder)]) == 0
    with _only(torch.float64):
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs.set_experts_implementation("eager")
    ours = _ours(model_config(read_config(folder)), torch.float64)
    load_weights(folder, _tensors(ours))
    tokens = torch.randint(1, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with _only(torch.float64):
        expected = theirs(tokens, use_cache=False).logits.detach()
    actual = ours(tokens, microbatch=Microbatch(2)).detach()
    comparison = compare({"logits": actual}, {"logits": expected}, bound=1e-12)
    assert comparison.ok, comparison
