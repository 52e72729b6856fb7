"""`hp-verify --checkpoint`, `--manifest`: tensors of two checkpoints, whatever holds them."""

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import save_checkpoint
from hp_platform.testing import run_distributed
from hp_trainer.config import ModelConfig, to_dict
from hp_trainer.config.options import resolve, shipped
from hp_trainer.model.shapes import model_shapes
from hp_transformers.families import save_weights
from hp_verify.cli import main as hp_verify
from hp_verify.files.checkpoints import Comparison, compare
from hp_verify.files.sources import opened_source

Tensors = dict[str, Tensor]
WIDTH, HIDDEN, VOCABULARY, EXPERTS = 8, 12, 20, 3


def published(seed: int = 0) -> Tensors:
    """A small model under names of Hugging Face."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    found = {"model.embed_tokens.weight": rand(VOCABULARY, WIDTH), "model.norm.weight": rand(WIDTH)}
    for layer in range(2):
        path = f"model.layers.{layer}"
        found |= {
            f"{path}.self_attn.q_proj.weight": rand(WIDTH, WIDTH),
            f"{path}.self_attn.k_proj.weight": rand(WIDTH // 2, WIDTH),
            f"{path}.self_attn.v_proj.weight": rand(WIDTH // 2, WIDTH),
            f"{path}.self_attn.q_proj.bias": rand(WIDTH),
            f"{path}.self_attn.k_proj.bias": rand(WIDTH // 2),
            f"{path}.self_attn.v_proj.bias": rand(WIDTH // 2),
            f"{path}.input_layernorm.weight": torch.ones(WIDTH),
        }
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                found[f"{path}.mlp.experts.{expert}.{name}.weight"] = rand(HIDDEN, WIDTH)
            found[f"{path}.mlp.experts.{expert}.down_proj.weight"] = rand(WIDTH, HIDDEN)
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    return found


def engine(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The same as a rollout engine fuses, stacks and casts it; the table is tied."""
    given = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    found = {n: given[n] for n in ("model.embed_tokens.weight", "model.norm.weight")}
    for layer in range(2):
        path = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [given[f"{path}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
            found[f"{path}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        name = f"{path}.input_layernorm.weight"
        found[name] = given[name]
        experts = [f"{path}.mlp.experts.{expert}" for expert in range(EXPERTS)]
        found[f"{path}.mlp.experts.w13_weight"] = torch.stack(
            [torch.cat([given[f"{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in experts]
        )
        found[f"{path}.mlp.experts.w2_weight"] = torch.stack(
            [given[f"{e}.down_proj.weight"] for e in experts]
        )
    return found


def in_safetensors(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    return path


def in_pieces(path: Path, tensors: Tensors) -> Path:
    path.mkdir()
    names = sorted(tensors)
    for number, some in enumerate((names[::2], names[1::2])):
        part = {name: tensors[name] for name in some}
        save_file(part, str(path / f"model-{number}.safetensors"))
    return path


def in_dcp(path: Path, tensors: Mapping[str, Tensor | bytes]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def in_torch(path: Path, tensors: Tensors) -> Path:
    torch.save({"model": tensors, "step": 3}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def random_tensors(model: ModelConfig) -> Tensors:
    """Random values for every tensor of a model of hp-train, exact in bfloat16."""
    g = torch.Generator().manual_seed(0)
    shapes = model_shapes(model).items()
    return {name: torch.randn(shape, generator=g).bfloat16().float() for name, shape in shapes}


def rank_saves(run: Path, preset: str) -> None:
    """Save a model of hp-train as a run does, with its name, moments and config."""
    config = resolve(preset, env={}).config
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: Tensors = {}
    for name, tensor in random_tensors(small(config.model)).items():
        is_cut = tensor.ndim > 0 and tensor.shape[0] % 2 == 0
        placements: list[Placement] = [Shard(0) if is_cut else Replicate()]
        tensors[f"model.{name}"] = distribute_tensor(tensor, mesh, placements)
        tensors[f"optimizer.exp_avg.{name}"] = distribute_tensor(tensor / 2, mesh, placements)
    save_checkpoint(
        run / "checkpoints",
        step=3,
        tensors=tensors,
        extra={"config": to_dict(config)},
        group=group,
        keep=1,
    )


def small(model: ModelConfig) -> ModelConfig:
    return replace(model, vocab_size=40, max_positions=64)


@pytest.mark.sample("debug-gpt-oss", "debug-qwen3-moe")
@pytest.mark.parametrize("preset", [name for name in shipped() if name.startswith("debug-")])
def test_a_run_is_found_in_what_a_family_publishes(preset: str, tmp_path: Path) -> None:
    model = small(resolve(preset, env={}).config.model)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_distributed(rank_saves, tmp_path / "run", preset, world_size=2)
    tensors = random_tensors(model)
    save_weights(tmp_path / "theirs", tensors, model, dtype=torch.float32)
    name = next(n for n in tensors if n.endswith(("wq.weight", "wq_a.weight")))
    tensors[name][1, 2] += 1.0
    save_weights(tmp_path / "wrong", tensors, model, dtype=torch.float32)

    found = compared(tmp_path / "run", tmp_path / "theirs")

    assert found.is_equal, found
    assert found.counts["equal"] > 20
    assert "state of the optimizer is in" in found.notes[0]
    [difference] = compared(tmp_path / "run", tmp_path / "wrong").differences
    assert "1 of " in difference.said
    assert compared(tmp_path / "run", tmp_path / "run").is_equal
    command = ["--checkpoint", str(tmp_path / "theirs"), str(tmp_path / "run")]
    assert hp_verify(command) == 0


def test_an_engine_has_what_a_run_of_hp_train_saved(tmp_path: Path) -> None:
    preset = "debug-qwen3-moe"
    model = small(resolve(preset, env={}).config.model)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_distributed(rank_saves, tmp_path / "run", preset, world_size=2)
    save_weights(tmp_path / "published", random_tensors(model), model, dtype=torch.float32)
    given = load_file(tmp_path / "published" / "model-00001-of-00001.safetensors")
    fused: Tensors = {}
    for name, tensor in given.items():
        if ".experts." not in name and not re.search(r"[qkv]_proj", name):
            fused[name] = tensor.bfloat16()
    for layer in {n.split(".self_attn")[0] for n in given if ".self_attn" in n}:
        parts = [given[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv"]
        fused[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts).bfloat16()
        experts = [f"{layer}.mlp.experts.{i}" for i in range(model.num_experts)]
        if f"{experts[0]}.up_proj.weight" not in given:
            continue
        ups = [torch.cat([given[f"{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in experts]
        fused[f"{layer}.mlp.experts.w13_weight"] = torch.stack(ups).bfloat16()
        downs = torch.stack([given[f"{e}.down_proj.weight"] for e in experts])
        fused[f"{layer}.mlp.experts.w2_weight"] = downs.bfloat16()
    engines = in_safetensors(tmp_path / "engine", fused)

    found = compared(tmp_path / "run", engines)

    assert found.is_equal, found
    assert found.made["experts stacked"] > 1
    swapped = "model.layers.1.mlp.experts.w13_weight"
    fused[swapped] = fused[swapped].roll(fused[swapped].shape[1] // 2, dims=1)
    wrong = in_safetensors(tmp_path / "wrong", fused)
    assert [d.name for d in compared(tmp_path / "run", wrong).differences] == [swapped]


def compared(a: Path, b: Path, ignore: str | None = None) -> Comparison:
    with opened_source(a) as ours, opened_source(b) as theirs:
        return compare(ours, theirs, ignore=ignore)


FORMATS: dict[str, Callable[[Path, Tensors], Path]] = {
    "safetensors": in_safetensors,
    "pieces": in_pieces,
    "dcp": in_dcp,
    "torch": in_torch,
}


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", FORMATS)
def test_the_same_tensors_are_equal_in_all_formats(a: str, b: str, tmp_path: Path) -> None:
    tensors = published()
    paths = FORMATS[a](tmp_path / "a", tensors), FORMATS[b](tmp_path / "b", tensors)

    found = compared(*paths)

    assert found.is_equal, found
    assert found.counts["equal"] == len(tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_one_value_that_differs_is_named(name: str, tmp_path: Path) -> None:
    tensors = published()
    a = in_safetensors(tmp_path / "a", tensors)
    wrong = {key: value.clone() for key, value in tensors.items()}
    wrong["model.layers.1.self_attn.k_proj.weight"][2, 5] += 1e-5
    b = FORMATS[name](tmp_path / "b", wrong)

    [difference] = compared(a, b).differences

    assert difference.name.endswith("model.layers.1.self_attn.k_proj.weight")
    assert "1 of 32 differ, most at [2, 5]" in difference.said


def test_an_engine_has_what_a_trainer_gave_it(tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = in_safetensors(tmp_path / "b", engine(published()))

    found = compared(a, b)

    assert found.is_equal, found
    assert found.counts["equal after a cast to bfloat16"] == len(engine(published()))
    assert found.notes == [
        "lm_head.weight has the values of model.embed_tokens.weight, which is there"
    ]


def swap_gates(t: Tensors) -> str:
    name = "model.layers.0.mlp.experts.w13_weight"
    t[name] = t[name].roll(HIDDEN, dims=1)
    return name


def swap_experts(t: Tensors) -> str:
    name = "model.layers.1.mlp.experts.w2_weight"
    t[name] = t[name].flip(0)
    return name


def stale_layer(t: Tensors) -> str:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    t[name] = engine(published(1))[name]
    return name


def keys_as_queries(t: Tensors) -> str:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    t[name] = t[name].roll(WIDTH // 2, dims=0)
    return name


def old_bias(t: Tensors) -> str:
    name = "model.layers.0.self_attn.qkv_proj.bias"
    t[name][3] += 0.125
    return name


def not_transposed(t: Tensors) -> str:
    name = "model.layers.0.mlp.experts.w2_weight"
    t[name] = t[name].mT.reshape(EXPERTS, WIDTH, HIDDEN).contiguous()
    return name


WRONG = (swap_gates, swap_experts, stale_layer, keys_as_queries, old_bias, not_transposed)


@pytest.mark.parametrize("fault", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("by_digest", [False, True], ids=["values", "digests"])
def test_a_wrong_conversion_is_named(
    fault: Callable[[Tensors], str], by_digest: bool, tmp_path: Path
) -> None:
    a = in_safetensors(tmp_path / "a", published())
    wrong = engine(published())
    name = fault(wrong)
    b = in_safetensors(tmp_path / "b", wrong)
    if by_digest:
        assert hp_verify(["--manifest", str(b), "--out", str(tmp_path / "b.json")]) == 0
        b = tmp_path / "b.json"

    [difference] = compared(a, b).differences

    assert difference.name == name


def test_a_manifest_is_as_good_as_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = in_safetensors(tmp_path / "b", engine(published()))
    listing = tmp_path / "b.json"

    assert hp_verify(["--manifest", str(b), "--out", str(listing)]) == 0
    assert hp_verify(["--checkpoint", str(a), str(listing)]) == 0
    assert hp_verify(["--checkpoint", str(listing), str(listing)]) == 0

    assert "equal after a cast to bfloat16" in capsys.readouterr().out


def test_values_are_found_whatever_they_are_called(tmp_path: Path) -> None:
    tensors = published()
    q, k = (tensors[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qk")
    gate, up = (tensors[f"model.layers.1.mlp.experts.2.{n}_proj.weight"] for n in ("gate", "up"))
    table = tensors["model.embed_tokens.weight"]
    given = {"q": q, "k": k, "gate": gate, "up": up, "table": table}
    foreign = {
        "decoder.0.attention.linear_qk": torch.stack([q.view(2, 4, 8), k.expand(2, 4, 8)], 1)
        .reshape(16, 8)[:12]
        .contiguous(),
        "decoder.1.fc1": torch.stack([gate, up], dim=1).reshape(-1, WIDTH),
        "decoder.1.fc1.turned": torch.cat([gate, up]).T.contiguous(),
        "word.table": torch.cat([table, torch.zeros(4, WIDTH)]),
        "head": table.to(torch.bfloat16),
    }
    a, b = in_safetensors(tmp_path / "a", given), in_safetensors(tmp_path / "b", foreign)

    found = compared(a, b)

    assert found.is_equal, found
    said = " ".join(found.made)
    assert "padded by * rows" in said
    assert "transposed" in said
    assert found.counts["equal after a cast to bfloat16"] == 1


def test_a_row_that_differs_is_found_under_a_foreign_name(tmp_path: Path) -> None:
    q = published()["model.layers.0.self_attn.q_proj.weight"]
    wrong = q.clone()
    wrong[3, 1] += 0.5
    a, b = in_safetensors(tmp_path / "a", {"q": q}), in_safetensors(tmp_path / "b", {"x": wrong})

    [difference] = compared(a, b).differences

    assert "1 of 64 differ, most at [3, 1]" in difference.said


def test_what_is_missing_extra_or_of_other_shape_is_listed(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 4), "gone": torch.randn(3), "cut": torch.randn(6, 2)}
    other = {"w": tensors["w"], "more": torch.randn(5), "cut": torch.randn(5, 2)}
    a, b = in_safetensors(tmp_path / "a", tensors), in_safetensors(tmp_path / "b", other)

    found = compared(a, b)

    assert set(found.missing) == {"gone", "cut"}
    assert set(found.extra) == {"more", "cut"}
    assert not found.differences
    assert compared(a, b, ignore="gone|more|cut").is_equal


def quantised(values: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Weights in 8 bits, and what each block of them is to be multiplied by."""
    rows, columns = (n // b for n, b in zip(values.shape, block, strict=True))
    blocks = values.reshape(rows, block[0], columns, block[1])
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = blocks.abs().amax(dim=(1, 3)) / most
    wide = scales[:, None, :, None]
    narrow = blocks / wide
    narrow = narrow.round() if dtype == torch.int8 else narrow
    return narrow.reshape(values.shape).to(dtype), scales


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("block", [(1, 256), (128, 128), (256, 256)], ids=["row", "block", "one"])
def test_quantised_weights_are_told_by_their_error(
    dtype: torch.dtype, block: tuple[int, int], tmp_path: Path
) -> None:
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    narrow, scales = quantised(values, dtype, block)
    a = in_safetensors(tmp_path / "a", {"q.weight": values})
    b = in_safetensors(tmp_path / "b", {"q.weight": narrow, "q.weight_scale": scales})
    c = in_safetensors(tmp_path / "c", {"q.weight": narrow, "q.weight_scale": scales * 1.2})

    found = compared(a, b)

    assert found.is_equal, found
    [(said, error)] = found.largest.items()
    assert "rounded to" in said
    assert 1e-3 < error < 0.15
    [difference] = compared(a, c).differences
    assert "beyond half a step" in difference.said


def test_state_of_the_optimizer_is_compared_where_both_have_it(tmp_path: Path) -> None:
    weights = {"model.w": torch.randn(4, 4)}
    full = weights | {"optimizer.exp_avg.w": torch.randn(4, 4)}
    other = weights | {"optimizer.exp_avg.w": torch.zeros(4, 4)}
    a, b, c = (
        in_safetensors(tmp_path / name, tensors)
        for name, tensors in (("a", full), ("b", weights), ("c", other))
    )

    assert compared(a, b).is_equal
    assert "state of the optimizer is in" in compared(a, b).notes[0]
    assert [d.name for d in compared(a, c).differences] == ["optimizer.exp_avg.w"]


def test_what_megatron_writes_is_read_and_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    weights = {"decoder.w": torch.randn(2, 4, 4), "optimizer.state.exp_avg.w": torch.ones(4)}
    names = ("rng_state", "_extra_state")
    objects = {f"{name}/shard_{i}_2": b"-" for name in names for i in (0, 1)}
    path = in_dcp(tmp_path / "torch_dist", {**weights, **objects})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.all_local_plans = [create_default_local_save_plan(weights, is_coordinator=True)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"args": 1}, path / "common.pt")

    result = compared(in_safetensors(tmp_path / "a", weights), path)

    assert result.is_equal
    [note] = result.notes
    assert note.endswith("no tensors: _extra_state (2 parts), common.pt, rng_state (2 parts)")


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_an_error_with_the_files_name(name: str, tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = FORMATS[name](tmp_path / "b", published())
    files = [b] if b.is_file() else [p for p in b.iterdir() if p.name != ".metadata"]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    with pytest.raises(CheckpointError, match=largest.name):
        compared(a, b)


@pytest.mark.parametrize("name", ["dcp", "torch"])
def test_a_flipped_bit_is_damage_where_the_format_can_tell(name: str, tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = FORMATS[name](tmp_path / "b", published())
    files = [b] if b.is_file() else [p for p in b.iterdir() if p.name != ".metadata"]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    needle = published()["lm_head.weight"].numpy().tobytes()
    data[data.index(needle) + 5] ^= 4
    largest.write_bytes(bytes(data))

    with pytest.raises(CheckpointError, match=largest.name):
        compared(a, b)


def test_statuses_are_those_of_the_other_doors(tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = in_safetensors(tmp_path / "b", published(1))

    assert hp_verify(["--checkpoint", str(a), str(a)]) == 0
    assert hp_verify(["--checkpoint", str(a), str(b)]) == 8
    assert hp_verify(["--checkpoint", str(a), str(tmp_path)]) == 4
    assert hp_verify(["--checkpoint", str(a)]) == 2
