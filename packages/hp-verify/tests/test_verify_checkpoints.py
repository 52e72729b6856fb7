"""`hp-verify --checkpoint`, `--manifest`: tensors of two checkpoints, whatever holds them."""

import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.state_dict_saver import save

from hp_base.errors import CheckpointError
from hp_checkpoint import encode_extra, sources_of
from hp_checkpoint.runs.save import save_step
from hp_verify import compare_checkpoints
from hp_verify.cli import main as hp_verify

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


def in_run(path: Path, tensors: Tensors) -> Path:
    """As hp-checkpoint saves them, in a run directory with a config."""
    (path / "checkpoints").mkdir(parents=True)
    save_step(
        path / "checkpoints",
        lambda: sources_of(tensors),
        step=3,
        extra=encode_extra({"config": {"of": "nobody's trainer"}}),
        group=None,
        keep=1,
    )
    return path


FORMATS: dict[str, Callable[[Path, Tensors], Path]] = {
    "safetensors": in_safetensors,
    "pieces": in_pieces,
    "dcp": in_dcp,
    "torch": in_torch,
    "run": in_run,
}


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", FORMATS)
def test_the_same_tensors_are_equal_in_all_formats(a: str, b: str, tmp_path: Path) -> None:
    tensors = published()
    paths = FORMATS[a](tmp_path / "a", tensors), FORMATS[b](tmp_path / "b", tensors)

    found = compare_checkpoints(*paths)

    assert found.is_equal, found
    assert found.counts["equal"] == len(tensors)


@pytest.mark.parametrize("name", FORMATS)
def test_one_value_that_differs_is_named(name: str, tmp_path: Path) -> None:
    tensors = published()
    a = in_safetensors(tmp_path / "a", tensors)
    wrong = {key: value.clone() for key, value in tensors.items()}
    wrong["model.layers.1.self_attn.k_proj.weight"][2, 5] += 1e-5
    b = FORMATS[name](tmp_path / "b", wrong)

    [difference] = compare_checkpoints(a, b).differences

    assert difference.name.endswith("model.layers.1.self_attn.k_proj.weight")
    assert "1 of 32 differ, most at [2, 5]" in difference.said


def test_an_engine_has_what_a_trainer_gave_it(tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = in_safetensors(tmp_path / "b", engine(published()))

    found = compare_checkpoints(a, b)

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

    [difference] = compare_checkpoints(a, b).differences

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

    found = compare_checkpoints(a, b)

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

    [difference] = compare_checkpoints(a, b).differences

    assert "1 of 64 differ, most at [3, 1]" in difference.said


def test_what_is_missing_extra_or_of_other_shape_is_listed(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 4), "gone": torch.randn(3), "cut": torch.randn(6, 2)}
    other = {"w": tensors["w"], "more": torch.randn(5), "cut": torch.randn(5, 2)}
    a, b = in_safetensors(tmp_path / "a", tensors), in_safetensors(tmp_path / "b", other)

    found = compare_checkpoints(a, b)

    assert set(found.missing) == {"gone", "cut"}
    assert set(found.extra) == {"more", "cut"}
    assert not found.differences
    assert compare_checkpoints(a, b, ignore="gone|more|cut").is_equal


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

    found = compare_checkpoints(a, b)

    assert found.is_equal, found
    [(said, error)] = found.largest.items()
    assert "rounded to" in said
    assert 1e-3 < error < 0.15
    [difference] = compare_checkpoints(a, c).differences
    assert "beyond half a step" in difference.said


def test_state_of_the_optimizer_is_compared_where_both_have_it(tmp_path: Path) -> None:
    weights = {"model.w": torch.randn(4, 4)}
    full = weights | {"optimizer.exp_avg.w": torch.randn(4, 4)}
    other = weights | {"optimizer.exp_avg.w": torch.zeros(4, 4)}
    a, b, c = (
        in_safetensors(tmp_path / name, tensors)
        for name, tensors in (("a", full), ("b", weights), ("c", other))
    )

    assert compare_checkpoints(a, b).is_equal
    assert "state of the optimizer is in" in compare_checkpoints(a, b).notes[0]
    assert [d.name for d in compare_checkpoints(a, c).differences] == ["optimizer.exp_avg.w"]


def test_what_megatron_writes_is_read_and_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    weights = {"decoder.w": torch.randn(2, 4, 4), "optimizer.state.exp_avg.w": torch.ones(4)}
    names = ("rng_state", "_extra_state")
    objects = {f"{name}/shard_{i}_2": b"-" for name in names for i in (0, 1)}
    path = in_dcp(tmp_path / "torch_dist", {**weights, **objects})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.all_local_plans = [create_default_local_save_plan(weights, is_coordinator=True)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"args": 1}, path / "common.pt")

    result = compare_checkpoints(in_safetensors(tmp_path / "a", weights), path)

    assert result.is_equal
    [note] = result.notes
    assert note.endswith("no tensors: _extra_state (2 parts), common.pt, rng_state (2 parts)")


def largest_file(path: Path) -> Path:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return max((p for p in files if p.name != ".metadata"), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_an_error_with_the_files_name(name: str, tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = FORMATS[name](tmp_path / "b", published())
    largest = largest_file(b)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    with pytest.raises(CheckpointError, match=largest.name):
        compare_checkpoints(a, b)


@pytest.mark.parametrize("name", ["dcp", "torch", "run"])
def test_a_flipped_bit_is_damage_where_the_format_can_tell(name: str, tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = FORMATS[name](tmp_path / "b", published())
    largest = largest_file(b)
    data = bytearray(largest.read_bytes())
    needle = published()["lm_head.weight"].numpy().tobytes()
    data[data.index(needle) + 5] ^= 4
    largest.write_bytes(bytes(data))

    with pytest.raises(CheckpointError, match=largest.name):
        compare_checkpoints(a, b)


@pytest.mark.parametrize(("a", "b"), [("safetensors", "run"), ("run", "safetensors")])
def test_names_that_are_declared_hold_and_what_one_alone_has_is_listed_as_its(
    a: str, b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may be the second: what else its tensors are called is known of it alone."""
    left, right = torch.ones(3, 5), torch.zeros(2)
    FORMATS[a](tmp_path / "a", {"scale": left, "only.a": torch.full((7,), 2.0)})
    FORMATS[b](tmp_path / "b", {"factor": left + 1, "only.b": right})
    (tmp_path / "names.json").write_text('{"factor": "scale"}')
    paths = [str(tmp_path / name) for name in "ab"]
    command = ["--checkpoint", *paths, "--names", str(tmp_path / "names.json")]

    assert hp_verify(command) == 8

    told = capsys.readouterr().out
    assert re.search("^FAIL  (factor|scale): .* 15 of 15 differ", told, re.MULTILINE)
    assert "FAIL  only in A: only.a [7]" in told
    assert "FAIL  only in B: only.b [2]" in told
    assert told.index("A: ") < told.index("B: ")


def test_statuses_are_those_of_jobs_and_curves(tmp_path: Path) -> None:
    a = in_safetensors(tmp_path / "a", published())
    b = in_safetensors(tmp_path / "b", published(1))

    assert hp_verify(["--checkpoint", str(a), str(a)]) == 0
    assert hp_verify(["--checkpoint", str(a), str(b)]) == 8
    assert hp_verify(["--checkpoint", str(a), str(tmp_path)]) == 4
    assert hp_verify(["--checkpoint", str(a)]) == 2
