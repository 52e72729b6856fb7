"""What stages of models of transformers begin with, read, write and refuse; one process each."""

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_base.errors import CheckpointError, ConfigError
from hp_checkpoint import Box, Part
from hp_expert import apply_to_transformers
from hp_overlap import CommComputeOverlap, HookCoordinator
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.model import DocumentTrial, DropoutKey, Microbatch, Stage
from hp_trainer.model.compiled import compile_blocks
from hp_trainer.model.parameters import Parameter, declared, named_parameters
from hp_trainer.model.recompute import Recompute
from hp_trainer.model.stage import experts_of
from hp_trainer.model.transformer import build_stage
from hp_trainer.overlap import overlap_experts
from hp_transformers.stages.export import write_folder
from hp_transformers.stages.load import load_folder
from hp_transformers.stages.outline import outline_of
from integration_tests.models.plain_transformers import FIELDS, loaded, make_folder, run_of

transformers: Any = pytest.importorskip("transformers", reason="of `nox -s transformers`")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # of transformers
]

TOKENS = torch.arange(24).view(2, 12) % 23 + 5


def stage_of(
    config: Config, layers: range | None = None, *, dtype: torch.dtype = torch.float64
) -> tuple[Stage, list[Parameter]]:
    """A stage of some layers, or of all, with its weights."""
    model = config.model
    layers = range(model.num_layers) if layers is None else layers
    stage = build_stage(
        model,
        model.vocab_size,
        layers=layers,
        first=layers[0] == 0,
        last=layers[-1] == model.num_layers - 1,
        compute_dtype=dtype,
    )
    stage.to(torch.promote_types(dtype, torch.float32))
    whole = declared(stage)
    stage.to_empty(device="cpu")
    parameters = named_parameters(stage, whole)
    stage.initialize(parameters, model, seed=3)
    return stage, parameters


def values_of(parameters: list[Parameter]) -> dict[str, Tensor]:
    return {parameter.name: parameter.local for parameter in parameters}


@pytest.mark.parametrize("name", FIELDS)
def test_first_weights_are_the_same_however_it_is_cut(name: str, tmp_path: Path) -> None:
    config = run_of(make_folder(name, tmp_path, weights=False))
    _, parameters = stage_of(config)
    whole = values_of(parameters)
    found: dict[str, Tensor] = {}
    for layers in (range(1), range(1, 4)):
        stage, parameters = stage_of(config, layers)
        parts = values_of(parameters)
        assert sum(p.numel() for p in stage.parameters()) < sum(t.numel() for t in whole.values())
        found |= parts
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[n], whole[n]) for n in whole)
    assert all(float(t.std()) > 0 for n, t in whole.items() if t.ndim > 1)


class Live(TorchDispatchMode):
    """Counts bytes of tensors on the CPU that operators have made and somebody holds.

    Args:
        known: Tensors that were there before.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.device.type == "cpu":
            storage = output.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        return output

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_one_parameter_at_a_time_is_whole_while_first_weights_are_drawn(tmp_path: Path) -> None:
    config = run_of(make_folder("qwen3_moe", tmp_path, weights=False, num_experts=16))
    stage, parameters = stage_of(config)
    layer = sum(p.local.nbytes for p in parameters if p.name.startswith("model.layers.0."))
    largest = max(p.local.nbytes for p in parameters)
    before = {p.name: p.local.clone() for p in parameters}
    for parameter in parameters:
        parameter.local.zero_()

    with Live((*(p.local for p in parameters), *stage.buffers())) as live:
        stage.initialize(parameters, config.model, seed=3)

    assert all(torch.equal(p.local, before[p.name]) for p in parameters)
    assert largest <= live.most < 1.1 * largest
    assert layer > 1.6 * largest


def test_a_rule_that_reads_other_parameters_draws_a_layer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(make_folder("llama", tmp_path, weights=False))
    rule = transformers.LlamaForCausalLM._init_weights

    def tied(self: Any, module: Any) -> None:
        rule(self, module)
        if hasattr(module, "k_proj"):
            module.v_proj.weight.data.copy_(2 * module.k_proj.weight)

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", tied)
    for layers in (None, range(1, 4)):
        _, parameters = stage_of(config, layers)
        found = values_of(parameters)
        kept = found["model.layers.2.self_attn.v_proj.weight"]
        assert torch.equal(kept, 2 * found["model.layers.2.self_attn.k_proj.weight"])


def test_bfloat16_over_float32_parameters_has_the_bits_of_the_model_in_bfloat16(
    tmp_path: Path,
) -> None:
    folder = make_folder("gemma2", tmp_path)
    stage, parameters = stage_of(run_of(folder, train__dtype="bfloat16"), dtype=torch.bfloat16)
    assert {p.local.dtype for p in parameters} == {torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = model(input_ids=TOKENS, use_cache=False).logits
    found = stage(TOKENS, microbatch=Microbatch(2))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    stage(TOKENS, microbatch=Microbatch(2, targets=TOKENS)).sum().backward()
    assert all(
        p.tensor.grad is not None and p.tensor.grad.dtype == torch.float32 for p in parameters
    )


def test_compiled_layers_have_the_same_bits(tmp_path: Path) -> None:
    config = run_of(make_folder("llama", tmp_path), train__dtype="bfloat16")
    found = []
    for compiler in ("none", "aot_eager"):
        stage, parameters = stage_of(config, dtype=torch.bfloat16)
        compile_blocks(stage, compiler)
        loss = stage(TOKENS, microbatch=Microbatch(2, targets=TOKENS))
        loss.backward()
        found.append([loss.detach(), *(p.tensor.grad for p in parameters)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_exchanges_of_all_experts_are_those_that_a_pair_overlaps(tmp_path: Path) -> None:
    stage, _ = stage_of(run_of(make_folder("qwen3_moe", tmp_path)))
    apply_to_transformers(stage)
    before = [part.dispatcher for part in experts_of(stage)]
    overlap = CommComputeOverlap(HookCoordinator(timeout=5.0))
    overlap_experts(stage, overlap)
    after = [part.dispatcher for part in experts_of(stage)]
    assert len(before) == 4
    assert not {type(each) for each in before} & {type(each) for each in after}


@pytest.mark.parametrize("what", ["none", "full"])
def test_compiled_layers_balance_their_experts_alike(what: Recompute, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    config = run_of(make_folder("qwen3_moe", tmp_path, **fields))
    key = DropoutKey(0, 0, torch.arange(2), torch.arange(TOKENS.shape[1]))
    found = []
    for compiler in ("none", "aot_eager"):
        stage, parameters = stage_of(config)
        stage.recompute(what)
        compile_blocks(stage, compiler)
        microbatch = Microbatch(2, key, targets=TOKENS)
        stage(TOKENS, microbatch=microbatch).backward()
        (balance,) = microbatch.balance_losses.values()
        assert float(balance) > 0.3
        found.append([balance, *(p.tensor.grad for p in parameters)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_experts_that_lie_one_by_one_in_several_files_are_read_in_parts(tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe", tmp_path / "one")
    model = loaded(folder)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 3
    name = "model.layers.2.mlp.experts.gate_up_proj"
    expected = model.get_parameter(name).detach()
    part = Part(torch.zeros(2, 8, 32), tuple(expected.shape), (1, 4, 0))
    load_folder(run_of(tmp_path / "many").model, {name: part})
    assert torch.equal(part.local, expected[1:3, 4:12].float())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "qwen3_next"])
def test_what_is_exported_has_names_and_bits_of_what_transformers_writes(
    name: str, tmp_path: Path
) -> None:
    folder = make_folder(name, tmp_path / "from")
    stage, parameters = stage_of(run_of(folder))
    tensors = values_of(parameters) | dict(stage.kept_buffers)
    boxes = {n: [Box((0,) * t.ndim, tuple(t.shape))] for n, t in tensors.items()}
    config = run_of(folder)
    out = tmp_path / "to"
    write_folder(
        out, boxes, lambda n, _: tensors[n], config.model, dtype=torch.float64, shard_bytes=40_000
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*index.values()}) > 1
    with_names = transformers.modeling_utils.safe_open(folder / "model.safetensors", framework="pt")
    assert {*index} == {*with_names.keys()}
    ours, theirs = loaded(out).state_dict(), loaded(folder).state_dict()
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    del boxes[next(iter(boxes))]
    with pytest.raises(CheckpointError, match="elements of the checkpoint"):
        write_folder(out, boxes, lambda n, _: tensors[n], config.model, dtype=torch.float64)


def test_a_layer_that_reads_more_than_hidden_states_is_named(tmp_path: Path) -> None:
    width = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    transformers.RoFormerConfig(
        vocab_size=64, num_hidden_layers=2, is_decoder=True, **width, **dropout
    ).save_pretrained(tmp_path)
    config = run_of(tmp_path)
    named = "layers: roformer.encoder.layer.0 reads in aten.split"
    assert named in outline_of(config.model).why_not
    with pytest.raises(ConfigError, match=r"\(mesh.pp must be 1\): more than hidden states"):
        stage_of(config, range(1))


def test_a_layer_that_gets_other_positions_is_named(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 2, "dim_head": 8, "dim_ff": 48, "prompt_types": 2}
    transformers.CpmAntConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, **fields
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cpmant.encoder.layers.0 gets other positions than"):
        stage_of(run_of(tmp_path), range(1))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, r"attn_dropout \(0.1\) of GPT2LMHeadModel must be 0"),
        ("llama", {"attention_dropout": 0.2}, r"attention_dropout \(0.2\) of .* must be 0"),
    ],
)
def test_what_depends_on_the_layout_is_refused(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = run_of(make_folder(name, tmp_path, weights=False, **fields))
    with pytest.raises(ConfigError, match=reason):
        stage_of(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remove": "model.norm.weight"}, "must have model.norm.weight"),
        ({"add": "model.scale"}, "must not have model.scale, which is no tensor of the model"),
        ({"narrow": "model.norm.weight"}, "model.norm.weight.* must be of shape"),
        ({"quantise": "lm_head.weight"}, "must be one of BF16, F16, F32, F64"),
    ],
)
def test_files_that_are_not_those_of_the_model_are_refused(
    change: dict[str, str], reason: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - comes with transformers

    folder = make_folder("llama", tmp_path)
    (kind, name), *_ = change.items()
    tensors = load_file(folder / "model.safetensors")
    if kind == "remove":
        del tensors[name]
    else:
        old = tensors.get(name, torch.zeros(2))
        new = {"add": old, "narrow": old[:3], "quantise": old.to(torch.int8)}
        tensors[name] = new[kind].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=reason):
        stage_of(run_of(folder))


def test_keys_follow_from_the_folder_or_are_refused(tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe", tmp_path / "model", weights=False)
    keys: dict[str, object] = {"model.transformers": str(folder)}
    (tmp_path / "run.toml").write_text("[data]\nseq_len = 32\n")
    source = str(tmp_path / "run.toml")
    resolved = resolve(source, keys.items(), env={})
    model = resolved.config.model
    assert (model.dim, model.num_layers, model.num_experts, model.top_k) == (32, 4, 4, 2)
    assert resolved.origins["model.dim"] == f"{folder}/config.json"
    alone = resolve(
        None, {**keys, "data.seq_len": 32}.items(), env={}
    )  # without a word of the quickstart's model and mesh
    assert (alone.name, alone.config.model, alone.config.mesh.pp) == ("model", model, 1)
    for given, reason in (
        ({"model.dim": 64}, r"model.dim \(64\) must be 32, as .*config.json says, or be left out"),
        ({"model.transformers": str(tmp_path)}, "must be a folder with config.json"),
        ({"mesh.etp": 2}, "mesh.etp .2. must be 1 with model.transformers"),
        (
            {"pipeline.overlap": True, "train.recompute": "full"},
            "pipeline.overlap .true. must be false with model.transformers .*recompute ..full",
        ),
        ({"run.init_from": str(folder)}, "run.init_from .* must be empty with model.transformers"),
        ({"train.recompute": "attention"}, "train.recompute .* must be none or full with"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve(source, (keys | given).items(), env={})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10**12}))
    with pytest.raises(ConfigError, match=r"json: model.vocab_size .10{12}. must be at most"):
        resolve(source, keys.items(), env={})


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
)
def test_weights_that_would_not_be_read_are_refused_and_not_drawn(
    name: str, tmp_path: Path
) -> None:
    folder = make_folder("llama", tmp_path / "model", weights=False)
    keys: dict[str, object] = {"model.transformers": str(folder), "data.seq_len": 32}
    resolve(None, keys.items(), env={})
    (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=f'must have its weights in safetensors files: "{name}"'):
        resolve(None, keys.items(), env={})
    (folder / "model.safetensors").touch()
    resolve(None, keys.items(), env={})


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


DRIFTS = (
    OWN
    + """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[config.first_that_drifts :]:
            layer.input_layernorm = Breeze(config.hidden_size)
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import LlamaRMSNorm
class Breeze(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x + 0.1 * pad(x, (0, 0, 1, -1)))
"""
)
"""Adds a little of the token before to each, in a class whose name says nothing."""


def own_folder(folder: Path, code: str, **fields: object) -> tuple[Path, dict[str, Any]]:
    """Write a model with code of its own, and its config."""
    make_folder("llama", folder)
    (folder / "modeling_own.py").write_text(code)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {}, **fields}
    for auto, kind in (("AutoConfig", "OwnConfig"), ("AutoModelForCausalLM", "OwnForCausalLM")):
        config["auto_map"][auto] = f"modeling_own.{kind}"
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


@pytest.mark.parametrize("layers", [range(4), range(2, 4)])
def test_documents_that_see_each_other_are_found_whatever_does_it_is_called(
    layers: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder, _ = own_folder(tmp_path / "drifts", DRIFTS, first_that_drifts=3)
    stage, _ = stage_of(run_of(folder, model__trust_remote_code=True), layers)
    said = r'must be "joined" with OwnForCausalLM: model.layers.3.input_layernorm \(Breeze\)'
    assert isinstance(stage, DocumentTrial)
    with pytest.raises(ConfigError, match=said):
        stage.try_documents()

    folder, _ = own_folder(tmp_path / "calm", DRIFTS, first_that_drifts=4)
    calm, _ = stage_of(run_of(folder, model__trust_remote_code=True), layers)
    assert isinstance(calm, DocumentTrial)
    calm.try_documents()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gpt2"])
def test_a_trial_finds_nothing_where_documents_stay_apart(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stage, _ = stage_of(run_of(make_folder(name, tmp_path, weights=False)), dtype=dtype)
    assert isinstance(stage, DocumentTrial)
    stage.try_documents()


def test_a_trial_finds_keys_that_are_chosen_in_other_documents(tmp_path: Path) -> None:
    from integration_tests.models.architectures.tiny import Tiny  # noqa: PLC0415 - needs transformers

    Tiny("glm_moe_dsa").make(tmp_path / "model")
    path = tmp_path / "model" / "config.json"  # which chooses more keys than a trial has
    path.write_text(json.dumps({**json.loads(path.read_text()), "index_topk": 2048}))
    stage, _ = stage_of(run_of(tmp_path / "model", data__documents="separate"))
    assert isinstance(stage, DocumentTrial)
    stage.try_documents()
    indexer = stage.get_submodule("model.layers.1.self_attn.indexer")
    indexer.forward = partial(_blind, indexer.forward)
    with pytest.raises(
        ConfigError, match=r"layers.1.self_attn \(GlmMoeDsaAttention\) computes for"
    ):
        stage.try_documents()


def _blind(forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Be what chooses keys, and see those of all documents."""
    size = hidden.shape[1]
    mask = torch.ones(size, size, dtype=torch.bool).tril()[None]
    known = [mask if isinstance(x, Tensor) and x.shape[-2:] == (size, size) else x for x in args]
    kwargs = {n: mask if n == "attention_mask" else x for n, x in kwargs.items()}
    return forward(hidden, *known, **kwargs)


def test_code_of_a_folder_runs_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = own_folder(tmp_path / "own", OWN)
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ConfigError, match=r"model.trust_remote_code \(false\) must be true"):
        run_of(folder)
    stage, _ = stage_of(run_of(folder, model__trust_remote_code=True))
    found = stage(TOKENS, microbatch=Microbatch(2))
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    del config["auto_map"]
    (plain / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    expected, _ = stage_of(run_of(plain))
    assert torch.equal(found, expected(TOKENS, microbatch=Microbatch(2)))


def test_without_the_key_nothing_of_transformers_is_imported() -> None:
    code = (
        "import sys, hp_trainer.training.train, hp_plan.layouts.command, hp_train.cli\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
