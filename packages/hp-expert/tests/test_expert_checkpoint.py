"""Experts under Hugging Face's names and stacked: the same bits, in either direction."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hp_expert.checkpoint.save as saving
from hp_base.errors import CheckpointError
from hp_expert import (
    ExpertNames,
    GroupedExperts,
    StackedPart,
    TensorParallel,
    expert_names,
    from_hf,
    load_experts,
    save_experts,
    stacked_parts,
    to_hf,
)
from hp_platform import PeerError
from hp_platform.testing import RankError, run_in_threads

EXPERTS, DIM, HIDDEN = 4, 3, 2
MIXTRAL = expert_names("mixtral")


class Fused(nn.Module):
    """The experts of a layer under the names of transformers."""

    def __init__(self, num_local: int = EXPERTS, first: int = 0, dtype: Any = None) -> None:
        super().__init__()
        self.num_experts, self.first_expert = EXPERTS, first
        self.gate_up_proj = nn.Parameter(torch.zeros(num_local, 2 * HIDDEN, DIM, dtype=dtype))
        self.down_proj = nn.Parameter(torch.zeros(num_local, DIM, HIDDEN, dtype=dtype))


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = experts


def single(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors, of the experts of one layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (HIDDEN, DIM), "up_proj": (HIDDEN, DIM), "down_proj": (DIM, HIDDEN)}
    return {
        f"mlp.experts.{e}.{name}.weight": torch.randn(shape, generator=generator)
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def stacked(weights: dict[str, Tensor], name: str) -> Tensor:
    return torch.stack([weights[f"mlp.experts.{e}.{name}.weight"] for e in range(EXPERTS)])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files, experts 0 and 1 in the first; and what else a checkpoint has."""
    weights = single()
    first = {k: v for k, v in weights.items() if k.split(".")[2] in "01"}
    others = {k: v for k, v in weights.items() if k not in first}
    save_file(first | {"mlp.gate.weight": torch.ones(EXPERTS, DIM)}, tmp_path / "a.safetensors")
    save_file(others, tmp_path / "b.safetensors")
    return tmp_path


def test_a_module_of_this_package_loads_all_experts(checkpoint: Path) -> None:
    layer = Layer(GroupedExperts(EXPERTS, DIM, HIDDEN))
    load_experts(layer, checkpoint, group=None)
    experts, weights = layer.mlp.experts, single()
    assert isinstance(experts, GroupedExperts)
    assert torch.equal(experts.w1, stacked(weights, "gate_proj"))
    assert torch.equal(experts.w3, stacked(weights, "up_proj"))
    assert torch.equal(experts.w2, stacked(weights, "down_proj"))


def test_fused_experts_have_gate_rows_before_up_rows(checkpoint: Path) -> None:
    layer, weights = Layer(Fused()), single()
    load_experts(layer, checkpoint, group=None)
    halves = [stacked(weights, name) for name in ("gate_proj", "up_proj")]
    assert torch.equal(layer.get_parameter("mlp.experts.gate_up_proj"), torch.cat(halves, dim=1))


def test_values_are_cast_to_the_dtype_of_the_parameter(checkpoint: Path) -> None:
    layer = Layer(Fused(dtype=torch.bfloat16))
    load_experts(layer, checkpoint, group=None)
    found = layer.get_parameter("mlp.experts.down_proj")
    assert torch.equal(found, stacked(single(), "down_proj").bfloat16())


def test_a_rank_reads_its_own_experts_one_projection_at_a_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], position: int) -> int:
        sizes.extend(len(buffer) // 4 for buffer in buffers)
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", spy)
    layer = Layer(Fused(num_local=1, first=2))
    load_experts(layer, checkpoint, group=None)
    gate = layer.get_parameter("mlp.experts.gate_up_proj")[0, :HIDDEN]
    assert torch.equal(gate, single()["mlp.experts.2.gate_proj.weight"])
    # Of 4 experts, one: nothing else was read, and never more than a projection at once.
    assert sum(sizes) == 3 * HIDDEN * DIM
    assert max(sizes) == HIDDEN * DIM


def test_a_part_of_the_hidden_dim_reads_only_that_part(checkpoint: Path) -> None:
    """A tensor-parallel rank with plain tensors says itself where its part is."""
    whole, half = (EXPERTS, HIDDEN, DIM), HIDDEN // 2
    w1, w2 = torch.zeros(EXPERTS, half, DIM), torch.zeros(EXPERTS, DIM, half)
    parts = {
        "mlp.experts.w1": StackedPart(w1, whole, (0, half, 0)),
        "mlp.experts.w2": StackedPart(w2, (EXPERTS, DIM, HIDDEN), (0, 0, half)),
        "mlp.experts.w3": StackedPart(torch.zeros(EXPERTS, half, DIM), whole, (0, 0, 0)),
    }
    load_experts(parts, checkpoint, group=None)
    assert torch.equal(w1, stacked(single(), "gate_proj")[:, half:])
    assert torch.equal(w2, stacked(single(), "down_proj")[:, :, half:])


@pytest.mark.parametrize("kind", [Fused, lambda: GroupedExperts(EXPERTS, DIM, HIDDEN)])
def test_stacked_tensors_of_a_file_are_read_in_slices(kind: Any, tmp_path: Path) -> None:
    weights = single()
    gate, up, down = (stacked(weights, f"{n}_proj") for n in ("gate", "up", "down"))
    fused = {
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down,
    }
    save_file(fused, tmp_path / "a.safetensors")
    layer = Layer(kind())
    load_experts(layer, tmp_path, group=None)
    found = to_hf(layer.state_dict())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def rewrite(checkpoint: Path, change: Any) -> None:
    weights = load_file(checkpoint / "b.safetensors")
    change(weights)
    save_file(weights, checkpoint / "b.safetensors")


def missing(weights: dict[str, Tensor]) -> None:
    del weights["mlp.experts.3.up_proj.weight"]


def unexpected(weights: dict[str, Tensor]) -> None:
    weights["mlp.experts.4.up_proj.weight"] = torch.ones(HIDDEN, DIM)


def quantised(weights: dict[str, Tensor]) -> None:
    weights["mlp.experts.3.up_proj.weight_scale_inv"] = torch.ones(1, 1)


def wrong_shape(weights: dict[str, Tensor]) -> None:
    weights["mlp.experts.3.up_proj.weight"] = torch.ones(DIM, HIDDEN)


def wrong_dtype(weights: dict[str, Tensor]) -> None:
    key = "mlp.experts.3.up_proj.weight"
    weights[key] = weights[key].to(torch.float8_e4m3fn)


WRONG = [
    (missing, r"files must contain mlp\.experts\.3\.up_proj\.weight"),
    (unexpected, r"must not contain mlp\.experts\.4\.up_proj\.weight"),
    (quantised, r"must not contain mlp\.experts\.3\.up_proj\.weight_scale_inv"),
    (wrong_shape, r"mlp\.experts\.3\.up_proj\.weight \(3, 2\) must equal \(2, 3\)"),
    (wrong_dtype, r"dtype of mlp\.experts\.3\.up_proj\.weight \(F8_E4M3\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_expert_is_named_on_every_rank_before_anything_changes(
    change: Any, message: str, checkpoint: Path
) -> None:
    rewrite(checkpoint, change)

    def rank_main(group: dist.ProcessGroup) -> None:
        layer = Layer(Fused(num_local=2, first=2 * group.rank()))
        with pytest.raises(ValueError, match=message):  # on rank 0 too, which has experts 0 and 1
            load_experts(layer, checkpoint, group=group)
        assert not any(parameter.any() for parameter in layer.parameters())

    run_in_threads(rank_main, world_size=2)


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(checkpoint: Path) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        layer = Layer(Fused(num_local=2, first=2 * group.rank()))
        where = checkpoint / "nowhere" if group.rank() == 1 else checkpoint
        kind = ValueError if group.rank() == 1 else PeerError
        with pytest.raises(kind, match="nowhere"):
            load_experts(layer, where, group=group)
        assert not any(parameter.any() for parameter in layer.parameters())

    run_in_threads(rank_main, world_size=2)


def test_a_file_that_is_damaged_on_one_rank_is_an_error_on_all(checkpoint: Path) -> None:
    damaged = checkpoint / "damaged"
    damaged.mkdir()
    for file in checkpoint.glob("*.safetensors"):
        (damaged / file.name).write_bytes(file.read_bytes()[:-10])

    def rank_main(group: dist.ProcessGroup) -> None:
        layer = Layer(Fused(num_local=2, first=2 * group.rank()))
        where, kind = (damaged, CheckpointError) if group.rank() else (checkpoint, PeerError)
        with pytest.raises(kind):
            load_experts(layer, where, group=group)
        assert not any(parameter.any() for parameter in layer.parameters())

    run_in_threads(rank_main, world_size=2, timeout=20)


def test_a_part_that_is_no_part_of_experts_on_one_rank_is_an_error_on_all(checkpoint: Path) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        parts = stacked_parts(Layer(GroupedExperts(EXPERTS, DIM, HIDDEN)))
        kind = ValueError if group.rank() else PeerError
        if group.rank():
            parts["mlp.experts.w4"] = parts["mlp.experts.w1"]
        with pytest.raises(kind, match=r"mlp\.experts\.w4"):
            load_experts(parts, checkpoint, group=group)

    run_in_threads(rank_main, world_size=2, timeout=20)


def test_a_file_that_one_rank_cannot_write_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_fit = saving._require_fit

    def spoil(*args: Any, **keywords: Any) -> None:
        """A directory in the place of the file, once all ranks have looked."""
        require_fit(*args, **keywords)
        if keywords["is_first"]:
            (tmp_path / "experts-00000-00002.safetensors").mkdir()

    monkeypatch.setattr(saving, "_require_fit", spoil)

    def rank_main(group: dist.ProcessGroup) -> None:
        kind = CheckpointError if group.rank() else PeerError
        with pytest.raises(kind):
            save_experts(Layer(Fused(2, 2 * group.rank())), tmp_path, group=group)

    run_in_threads(rank_main, world_size=2, timeout=20)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_parts_of_the_hidden_dim_that_do_not_say_so_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        layer = Layer(TensorParallel().apply(GroupedExperts(EXPERTS, DIM, HIDDEN), group))
        with pytest.raises(ValueError, match=r"mlp\.experts must have whole experts"):
            save_experts(layer, tmp_path / "new", group=group)
        with pytest.raises(ValueError, match=r"mlp\.experts must have whole experts"):
            load_experts(layer, checkpoint, group=group)

    run_in_threads(rank_main, world_size=2)
    assert not (tmp_path / "new").exists()


def test_tied_tensors_are_written_under_each_name(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(3, 2)
    others = {"embed.weight": shared, "head.weight": shared}
    save_experts(Layer(Fused()), tmp_path, others=others, group=None)
    found = load_file(tmp_path / "model-others.safetensors")
    assert found.keys() == others.keys()
    assert all(torch.equal(tensor, shared) for tensor in found.values())


@pytest.mark.parametrize("kind", [Fused, lambda: GroupedExperts(EXPERTS, DIM, HIDDEN)])
def test_experts_that_are_the_whole_module_need_no_path(kind: Any, tmp_path: Path) -> None:
    experts: nn.Module = kind()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    save_experts(experts, tmp_path, group=None)
    file = load_file(next(tmp_path.glob("*.safetensors")))
    assert file.keys() == to_hf(experts.state_dict()).keys()
    assert "0.gate_proj.weight" in file
    again: nn.Module = kind()
    load_experts(again, tmp_path, group=None)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in experts.named_parameters())


def test_parameters_without_memory_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="must have memory"):
        load_experts(Layer(Fused()).to("meta"), checkpoint, group=None)


def test_no_flipped_bit_of_what_was_saved_loads(tmp_path: Path) -> None:
    layer = Layer(GroupedExperts(EXPERTS, DIM, HIDDEN))
    save_experts(layer, tmp_path, others={"gate": torch.ones(2)}, group=None)
    # The index is for others: nothing here reads it. Nor is the gate read, which is no expert.
    files = [*tmp_path.glob("manifest.*"), *tmp_path.glob("experts-*")]
    assert len(files) == 3
    chance = random.Random(0)
    for file in chance.choices(files, [file.stat().st_size for file in files], k=150):
        whole = file.read_bytes()
        data, bit = bytearray(whole), chance.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(ValueError):
            load_experts(layer, tmp_path, group=None)
        file.write_bytes(whole)
    load_experts(layer, tmp_path, group=None)


def test_a_module_without_experts_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="must contain experts"):
        load_experts(nn.Linear(2, 2), checkpoint, group=None)


def test_ranks_save_what_fewer_ranks_load(tmp_path: Path) -> None:
    """EP4 to EP2 to EP1 through files, exact to the bit."""
    weights = single()
    directories = [tmp_path / name for name in ("4", "2", "1")]
    tmp = tmp_path / "source"
    tmp.mkdir()
    save_file(weights, tmp / "a.safetensors")

    def rank_main(group: dist.ProcessGroup, source: Path, target: Path) -> None:
        num_local = EXPERTS // group.size()
        layer = Layer(Fused(num_local, num_local * group.rank()))
        load_experts(layer, source, group=group)
        others = {"mlp.gate.weight": torch.ones(EXPERTS, DIM)}
        save_experts(layer, target, others=others, group=group)

    for ranks, source, target in zip((4, 2, 1), [tmp, *directories], directories, strict=False):
        run_in_threads(partial(rank_main, source=source, target=target), world_size=ranks)
        assert len(list(target.glob("experts-*.safetensors"))) == ranks
    found: dict[str, Tensor] = {}
    for file in sorted(directories[-1].glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == weights.keys() | {"mlp.gate.weight"}
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_directory_with_files_is_not_written_to(checkpoint: Path) -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        save_experts(Layer(Fused(2, 2 * group.rank())), checkpoint, group=group)

    with pytest.raises(RankError, match="must have no safetensors files"):
        run_in_threads(rank_main, world_size=2)
    assert len(list(checkpoint.iterdir())) == 2


def test_stacked_checkpoints_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not be stacked"):
        save_experts(Layer(Fused()), tmp_path, names=expert_names("granitemoe"), group=None)


NAMES = [ExpertNames(), MIXTRAL, expert_names("lfm2_moe"), expert_names("granitemoe")]


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    first=st.integers(0, 3),
    names=st.sampled_from(NAMES),
    bias=st.booleans(),
)
def test_names_there_and_back_give_the_same_state_dict(
    sizes: tuple[int, int, int], first: int, names: ExpertNames, bias: bool
) -> None:
    num_experts, dim, hidden = sizes
    state = {
        "layers.0.mlp.experts.gate_up_proj": torch.randn(num_experts, 2 * hidden, dim),
        "layers.0.mlp.experts.down_proj": torch.randn(num_experts, dim, hidden),
        "layers.1.mlp.experts.w1": torch.randn(num_experts, hidden, dim),
        "layers.1.mlp.experts.w2": torch.randn(num_experts, dim, hidden),
        "layers.1.mlp.experts.w3": torch.randn(num_experts, hidden, dim),
        "layers.0.mlp.gate.weight": torch.randn(3, dim),
    }
    if bias:
        state["layers.0.mlp.experts.gate_up_proj_bias"] = torch.randn(num_experts, 2 * hidden)
        state["layers.0.mlp.experts.down_proj_bias"] = torch.randn(num_experts, dim)
        state |= {f"layers.1.mlp.experts.b{i}": torch.randn(num_experts, dim) for i in (2,)}
    like = {key: tensor.to("meta") for key, tensor in state.items()}
    single_ones = to_hf(state, names, first_expert=first)
    back = from_hf(single_ones, like, names, first_expert=first)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_names_are_those_of_the_family() -> None:
    found = to_hf(Layer(Fused(num_local=1)).state_dict(), ExpertNames(), first_expert=3)
    assert sorted(found) == [f"mlp.experts.3.{name}_proj.weight" for name in ("down", "gate", "up")]
    model = nn.ModuleDict({"layer": Layer(Fused(num_local=1))})
    assert sorted(to_hf(model.state_dict(), MIXTRAL)) == [
        f"layer.block_sparse_moe.experts.0.w{i}.weight" for i in (1, 2, 3)
    ]


def test_single_experts_are_views_of_the_stacked_ones() -> None:
    state = Layer(Fused()).state_dict()
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert {t.untyped_storage().data_ptr() for t in to_hf(state).values()} == storages


def test_a_missing_expert_is_named() -> None:
    state = to_hf(Layer(Fused()).state_dict())
    del state["mlp.experts.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"must contain mlp\.experts\.1\.up_proj\.weight"):
        from_hf(state, Layer(Fused()).state_dict())


def test_a_part_outside_the_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="must be inside shape"):
        StackedPart(torch.zeros(2, 3, 4), (4, 3, 4), (3, 0, 0))


def test_parts_say_where_the_local_experts_are() -> None:
    part = stacked_parts(Layer(Fused(num_local=1, first=2)))["mlp.experts.down_proj"]
    assert (part.shape, part.offset) == ((EXPERTS, DIM, HIDDEN), (2, 0, 0))
