"""Files of Hugging Face models, written and read without transformers."""

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_base.errors import CheckpointError, ConfigError
from hp_checkpoint import Box
from hp_checkpoint.safetensors import FileTensor
from hp_platform.testing import RankError, compare, run_distributed
from hp_train.cli import main
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve, shipped
from hp_trainer.model.transformer import model_shapes
from hp_transformers.families import (
    check_weights,
    hf_config,
    load_weights,
    model_config,
    read_config,
    save_weights,
)
from hp_transformers.families.config import config_after
from hp_transformers.families.handed_on import tokens_of
from hp_transformers.families.load import opened_files
from hp_transformers.original import Original

pytestmark = pytest.mark.usefixtures("one_thread")

PRESETS = [name for name in shipped() if name.startswith("debug-")]
INDEX = "model.safetensors.index.json"


def _model(name: str) -> ModelConfig:
    model = resolve(name, env={}).config.model
    return replace(model, vocab_size=40, max_positions=64)


def _tensors(model: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Random values for every tensor of a model, exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).bfloat16().float()
        for name, shape in model_shapes(model).items()
    }


def _empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_names_and_layout_come_back(name: str, tmp_path: Path) -> None:
    model = _model(name)
    tensors = _tensors(model)
    save_weights(tmp_path / "a", tensors, model, dtype=torch.bfloat16, shard_bytes=30_000)
    found = _empty(tensors)
    load_weights(tmp_path / "a", found)
    comparison = compare(found, tensors)
    assert comparison.ok, comparison
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 1
    theirs: dict[str, Tensor] = {}
    for file in files:
        inside = load_file(file)  # the library agrees with what was written
        assert all(index["weight_map"][key] == file.name for key in inside)
        theirs |= inside
    assert theirs.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in theirs.values())
    biases = {k for k in theirs if k.endswith("correction_bias")}
    assert all((t.dtype == torch.float32) == (k in biases) for k, t in theirs.items())
    assert check_weights(tmp_path / "a") == sum(t.numel() for t in tensors.values())


def test_published_names_are_used(tmp_path: Path) -> None:
    expected = {
        "debug-llama3": "model.layers.1.mlp.gate_proj.weight",
        "debug-qwen3": "model.layers.0.self_attn.q_norm.weight",
        "debug-qwen3-moe": "model.layers.1.mlp.experts.15.down_proj.weight",
        "debug-mixtral": "model.layers.1.block_sparse_moe.experts.7.w3.weight",
        "debug-deepseek-v3": "model.layers.3.eh_proj.weight",
        "debug-gpt-oss": "model.layers.0.mlp.experts.gate_up_proj_bias",
    }
    assert expected.keys() == set(PRESETS)
    for name, key in expected.items():
        model = _model(name)
        save_weights(tmp_path / name, _tensors(model), model, dtype=torch.float32)
        assert key in json.loads((tmp_path / name / INDEX).read_text())["weight_map"]


def test_gate_and_up_of_gpt_oss_are_columns_in_turns(tmp_path: Path) -> None:
    model = _model("debug-gpt-oss")
    tensors = _tensors(model)
    save_weights(tmp_path, tensors, model, dtype=torch.float32)
    [file] = tmp_path.glob("*.safetensors")
    theirs = load_file(file)
    path = "layers.0.moe.experts"
    gate_up = theirs["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up[..., ::2], tensors[f"{path}.w1"].mT)
    assert torch.equal(gate_up[..., 1::2], tensors[f"{path}.w3"].mT)
    down = theirs["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(down, tensors[f"{path}.w2"].mT)
    bias = theirs["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert torch.equal(bias[:, 1::2], tensors[f"{path}.b3"])


@pytest.mark.parametrize("name", shipped())
def test_settings_come_back(name: str) -> None:
    config = resolve(name, env={}).config
    model = replace(config.model, vocab_size=config.model.vocab_size or 40, max_positions=4096)
    written = json.loads(json.dumps(hf_config(model, dtype="bfloat16")))
    assert hf_config(model_config(written), dtype="bfloat16") == written


def test_settings_of_version_5_are_read() -> None:
    model = _model("debug-llama3")
    old = json.loads(json.dumps(hf_config(model, dtype="float32")))
    scaling = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    new = {k: v for k, v in old.items() if not k.startswith("rope_")} | {"rope_parameters": scaling}
    assert model_config(new) == model_config(old)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bert"}, 'model_type ("bert") must be one of llama, qwen3, '),
        ({"hidden_act": "gelu"}, 'hidden_act ("gelu") must be "silu"'),
        ({"hidden_size": None}, "hidden_size (null) must be an integer of 1 to 2147483647"),
        ({"hidden_size": "x"}, 'hidden_size ("x") must be an integer of 1 to'),
        ({"num_hidden_layers": -1}, "num_hidden_layers (-1) must be an integer of 1 to 10000"),
        ({"mlp_bias": True}, "mlp_bias (true) must be false"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, 'rope_type ("dynamic") must be default or'),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            'quantization_config ("mxfp4") must be absent: quantised weights are not read',
        ),
    ],
)
def test_other_settings_are_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    settings = hf_config(_model("debug-llama3"), dtype="float32") | changed
    with pytest.raises(ConfigError) as caught:
        model_config(settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_no_family_is_refused() -> None:
    model = replace(_model("debug-qwen3-moe"), num_shared_experts=1)
    with pytest.raises(ConfigError, match=r"model.num_shared_experts \(1\) must be what a family"):
        hf_config(model, dtype="float32")


def _saved(folder: Path) -> dict[str, Tensor]:
    model = _model("debug-mixtral")
    save_weights(folder, _tensors(model), model, dtype=torch.float32)
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def _put(folder: Path, theirs: dict[str, Tensor]) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    save_file(theirs, folder / "model.safetensors")


GATE = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE), f"files of the model must have {GATE}"),
        (
            lambda t: t.update({"model.extra": torch.ones(1)}),
            "files of the model must not have model.extra",
        ),
        (
            lambda t: t.update({GATE: torch.ones(3, 64)}),
            rf"tensor {GATE} \(\[3, 64\]\) must be of shape \[8, 64\]",
        ),
        (
            lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}),
            rf"tensor {GATE} \(F8_E4M3\) must be one of .*: quantised",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.ones(1)}),
            "gate_up_proj_blocks .*: quantised",
        ),
    ],
)
def test_other_weights_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    theirs = _saved(tmp_path)
    change(theirs)
    _put(tmp_path, theirs)
    found = _empty(_tensors(_model("debug-mixtral")))
    with pytest.raises(ConfigError, match=message):
        load_weights(tmp_path, found)
    assert all(bool(t.isnan().all()) for t in found.values())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    _put(tmp_path, _saved(tmp_path))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for damaged in (
        b"",
        whole[:100],
        whole[:-1],
        struct.pack("<Q", 2**62) + whole[8:],
        whole[:8] + b"x" * header + whole[8 + header :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="must"):
            check_weights(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        check_weights(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ConfigError, match="must be a name in the folder"):
        check_weights(tmp_path)


def test_only_the_bytes_of_a_box_are_read(tmp_path: Path) -> None:
    x = torch.arange(4 * 5 * 6.0).view(4, 5, 6)
    save_file({"x": x}, tmp_path / "model.safetensors")
    with opened_files(tmp_path) as files:
        for box in (
            ((0, 0, 0), (4, 5, 6)),
            ((1, 0, 0), (2, 5, 6)),
            ((1, 2, 0), (1, 3, 6)),
            ((0, 1, 2), (4, 3, 3)),
            ((3, 4, 5), (1, 1, 1)),
            ((0, 0, 0), (0, 5, 6)),
        ):
            (a, b, c), (na, nb, nc) = box
            assert torch.equal(files["x"].read(Box(*box)), x[a : a + na, b : b + nb, c : c + nc])


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    before = _saved(tmp_path)
    model = _model("debug-mixtral")
    with pytest.raises(ConfigError, match="must have no safetensors files"):
        save_weights(tmp_path, _tensors(model, seed=1), model, dtype=torch.float32)
    [file] = tmp_path.glob("*.safetensors")
    assert compare(load_file(file), before).ok


def test_a_tensor_that_nobody_has_is_named(tmp_path: Path) -> None:
    model = _model("debug-mixtral")
    tensors = _tensors(model)
    del tensors["layers.1.moe.router.weight"]
    with pytest.raises(CheckpointError, match=r"tensor layers.1.moe.router.weight: elements"):
        save_weights(tmp_path, tensors, model, dtype=torch.float32)
    assert not (tmp_path / INDEX).exists()


def _sharded(tensors: dict[str, Tensor], cut: str) -> dict[str, Tensor]:
    """As the ranks of a layout have tensors: two data-parallel ranks with half of the experts each,
    or experts cut along their hidden width and matrices along rows or columns."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        in_stack = ".experts." in name
        if cut == "experts":
            placement: Any = Shard(0) if in_stack else None
        elif in_stack:
            placement = (
                Shard({"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1}[name[-2:]])
                if not name.endswith("b2")
                else Replicate()
            )
        else:
            placement = Shard(tensor.ndim - 1)
        found[name] = tensor if placement is None else distribute_tensor(tensor, mesh, [placement])
    return found


def _save_and_load_on_ranks(folder: str, name: str, cut: str) -> None:
    torch.set_num_threads(1)
    group = torch.distributed.group.WORLD
    model = _model(name)
    tensors = _tensors(model)
    mine = _sharded(tensors, cut)
    save_weights(
        Path(folder) / cut / name,
        mine,
        model,
        dtype=torch.bfloat16,
        group=group,
        shard_bytes=50_000,
    )
    found = _sharded(_empty(tensors), cut)
    load_weights(Path(folder) / cut / name, found, group=group)
    for key, tensor in found.items():
        pairs = [t.to_local() if isinstance(t, DTensor) else t for t in (tensor, mine[key])]
        assert torch.equal(*pairs), key


def _every_case(folder: str) -> None:
    for cut in ("experts", "widths"):
        for name in PRESETS:
            _save_and_load_on_ranks(folder, name, cut)


def test_ranks_write_together_what_one_process_writes(tmp_path: Path) -> None:
    run_distributed(partial(_every_case, str(tmp_path)), world_size=2, timeout=120)
    for name in PRESETS:
        model = _model(name)
        alone = tmp_path / "alone" / name
        save_weights(alone, _tensors(model), model, dtype=torch.bfloat16, shard_bytes=50_000)
        expected = {path.name: path.read_bytes() for path in sorted(alone.iterdir())}
        for cut in ("experts", "widths"):
            folder = tmp_path / cut / name
            assert {path.name: path.read_bytes() for path in sorted(folder.iterdir())} == expected


def _load_what_one_rank_cannot(folder: str) -> None:
    model = _model("debug-mixtral")
    tensors = _tensors(model)
    if torch.distributed.get_rank() == 1:
        tensors["norm.weight"] = torch.ones(3)
    load_weights(Path(folder), tensors, group=torch.distributed.group.WORLD)


def test_all_ranks_raise_when_one_cannot_load(tmp_path: Path) -> None:
    _saved(tmp_path)
    with pytest.raises(RankError) as caught:
        run_distributed(
            partial(_load_what_one_rank_cannot, str(tmp_path)), world_size=2, timeout=60
        )
    assert r"tensor norm.weight ([3]) must have shape [64]" in str(caught.value)


def _count_bytes(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = _tensors(_model("debug-mixtral"))["layers.0.moe.experts.w1"]
    read: list[int] = []
    original = FileTensor.read

    def counted(self: FileTensor, box: Any) -> Tensor:
        values = original(self, box)
        read.append(values.nbytes)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileTensor, "read", counted)
        for dim in range(3):
            tensor = distribute_tensor(torch.empty_like(whole), mesh, [Shard(dim)])
            load_weights(Path(folder), {"layers.0.moe.experts.w1": tensor})
            part = whole.chunk(2, dim)[torch.distributed.get_rank()]
            assert torch.equal(tensor.to_local(), part)
            assert sum(read) == part.nbytes == whole.nbytes // 2
            read.clear()


def test_a_rank_reads_its_own_slices_alone(tmp_path: Path) -> None:
    _saved(tmp_path)
    run_distributed(partial(_count_bytes, str(tmp_path)), world_size=2, timeout=60)


def test_the_header_is_what_the_library_writes(tmp_path: Path) -> None:
    _saved(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert read_config(tmp_path)["architectures"] == ["MixtralForCausalLM"]


def _came(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """A model, and a `config.json` of it with more than any family reads."""
    model = _model(name)
    more = {"eos_token_id": [2, 7], "id2label": {"0": "a"}, "auto_map": None, "mine": {"a": [1.5]}}
    return model, {**hf_config(model, dtype="bfloat16"), **more}


@pytest.mark.parametrize("name", PRESETS)
def test_settings_that_a_model_came_with_stay_word_for_word(name: str) -> None:
    model, theirs = _came(name)
    assert config_after(theirs, model, dtype=None) == theirs
    assert config_after(theirs, model, dtype="float32") == theirs | {"torch_dtype": "float32"}
    renamed = {**theirs, "dtype": theirs["torch_dtype"], "text_config": {"dtype": "bfloat16"}}
    del renamed["torch_dtype"]
    expected = {**renamed, "dtype": "float32", "text_config": {"dtype": "float32"}}
    assert config_after(renamed, model, dtype="float32") == expected
    freed = replace(model, init_std=0.5)
    assert config_after(theirs, freed, dtype=None) == theirs | {"initializer_range": 0.5}


def test_settings_say_what_a_run_has_changed_and_nothing_else() -> None:
    model, theirs = _came("debug-llama3")
    tied = replace(model, tie_embeddings=not model.tie_embeddings)
    expected = theirs | {"tie_word_embeddings": tied.tie_embeddings}
    assert config_after(theirs, tied, dtype=None) == expected
    longer = replace(model, max_positions=128, rope_theta=77.0, rope_factor=2.0)
    found = config_after(theirs, longer, dtype=None)
    assert {key for key in found if found[key] != theirs[key]} == {
        *("max_position_embeddings", "rope_theta", "rope_scaling"),
    }
    new = {k: v for k, v in theirs.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**theirs["rope_scaling"], "rope_theta": theirs["rope_theta"]}
    assert config_after(new, model, dtype=None) == new
    found = config_after(new, longer, dtype=None)
    assert "rope_parameters" not in found
    assert model_config(found) == model_config(hf_config(longer, dtype="bfloat16"))
    model, theirs = _came("debug-qwen3-moe")
    theirs["num_local_experts"] = theirs["num_experts"]
    fewer = replace(model, top_k=1)
    assert config_after(theirs, fewer, dtype=None) == theirs | {"num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("separator", "ends", "has_other", "expected"),
    [
        ("", [9], False, None),
        ("<z>", [0], False, 1),
        ("<z>", [[0, 2], [0]], False, 1),
        ("<z>", [None], False, 1),
        ("<z>", [1], False, None),
        ("<z>", [None, [0, 1]], False, None),
        ("<z>", [0, [0, 1]], False, 1),
        ("<z>", [1], True, 1),
        ("", [9], True, 0),
    ],
)
def test_a_separator_that_a_run_names_ends_what_its_export_generates(
    tmp_path: Path, separator: str, ends: list[object], has_other: bool, expected: int | None
) -> None:
    pytest.importorskip("tokenizers")
    vocab = {"<eos>": 0, "<z>": 1, "a": 2}
    added = [{"id": i, "content": name, "special": i < 2} for name, i in vocab.items() if i < 2]
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    came: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [token | rules for token in added],
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
        },
        "tokenizer_config.json": {"eos_token": "<eos>"},
    }
    for name, end in zip(("config.json", "generation_config.json"), ends, strict=False):
        came[name] = {"eos_token_id": end}
    files = {name: partial(bytes, json.dumps(values).encode()) for name, values in came.items()}
    used = tmp_path / "tokenizer.json"
    used.write_bytes(files[used.name]())
    keys = [("data.tokenizer", str(used)), ("data.separator", separator)]
    config = resolve("debug-llama3", keys, env={}).config
    found = tokens_of(Original(files, has_other_tokenizer=has_other), config)
    assert found.ids.get("eos_token_id") == expected
    assert has_other or found.ids.keys() <= {"eos_token_id"}


def test_a_weight_that_does_not_fit_the_files_it_came_in_is_named(tmp_path: Path) -> None:
    model = _model("debug-llama3")
    tensors = _tensors(model)
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 1e5)
    save_weights(tmp_path / "wide", tensors, model, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model.norm.weight must fit float16, .*--dtype"):
        save_weights(tmp_path / "narrow", tensors, model, dtype=torch.float16)
    assert not (tmp_path / "narrow" / INDEX).exists()


def test_a_printed_config_is_for_weights_that_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model("debug-llama3")
    save_weights(tmp_path / "model", _tensors(model), model, dtype=torch.bfloat16)
    out = tmp_path / "my.toml"
    assert main(["import-hf", str(tmp_path / "model"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}; to train: hp train {out} --data FILES\n"
    train = resolve(str(out), env={}).config.train
    assert (train.learning_rate, train.warmup_steps, train.steps) == (1e-5, 100, 1000)
