from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from hp_checkpoint.runs import Loaded, load_latest, save_checkpoint, verify_checkpoint
from hp_platform.testing import run_distributed

ODD_TENSORS = {
    "scalar": torch.tensor(2.5),
    "step": torch.tensor(7),
    "no_rows": torch.empty(0, 5),
    "no_columns": torch.empty(3, 0, dtype=torch.bfloat16),
    "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "strided": torch.arange(20, dtype=torch.float64)[::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "name with spaces, a dot. and @0,0": torch.tensor([1]),
    "nan payload": torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32),
    "negative zero": torch.tensor([-0.0, 5e-324], dtype=torch.float64),
}


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def bits(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    return bytes(local.contiguous().reshape(-1).view(torch.uint8).tolist())


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and strides, filled with something else."""
    return {
        name: torch.full(x.shape, 3, dtype=torch.float32).to(x.dtype) for name, x in tensors.items()
    }


def save(
    path: Path, group: ProcessGroup, tensors: dict[str, Tensor], step: int = 1, **kwargs: Any
) -> Path:
    options = {"extra": {}, "keep": 10, **kwargs}
    return save_checkpoint(path, step=step, tensors=tensors, group=group, **options)


def load(path: Path, group: ProcessGroup, tensors: dict[str, Tensor]) -> Loaded:
    loaded = load_latest(path, tensors=tensors, group=group)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ],
    ids=str,
)
def test_every_dtype_comes_back_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, group: ProcessGroup
) -> None:
    saved = {"x": (100 * torch.randn(3, 5, 2)).to(dtype), "y": torch.ones(3)}
    save(tmp_path, group, saved)
    loaded = blank(saved)
    load(tmp_path, group, loaded)
    assert bits(loaded["x"]) == bits(saved["x"])


def test_scalars_empty_and_strided_tensors_come_back_bit_for_bit(
    tmp_path: Path, group: ProcessGroup
) -> None:
    save(tmp_path, group, ODD_TENSORS)
    loaded = blank(ODD_TENSORS)
    load(tmp_path, group, loaded)
    for name, tensor in ODD_TENSORS.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_tensors_are_filled_in_place_whatever_their_strides(
    tmp_path: Path, group: ProcessGroup
) -> None:
    expected = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    save(tmp_path, group, {"x": expected, "p": expected})
    base, parameter = torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(4, 3))
    load(tmp_path, group, {"x": base.t(), "p": parameter})
    assert torch.equal(base.t(), expected)
    assert torch.equal(parameter, expected)


@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5))
def test_any_shapes_come_back(
    shapes: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any")
    saved = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    store = f"file://{path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        save(path, world, saved)
        loaded = blank(saved)
        load(path, world, loaded)
    finally:
        dist.destroy_process_group()
    assert all(bits(loaded[name]) == bits(saved[name]) for name in saved)


def test_files_are_safetensors_that_anybody_can_read(tmp_path: Path, group: ProcessGroup) -> None:
    saved = {"w": torch.randn(4, 3), "half": torch.randn(5).bfloat16(), "s": torch.tensor(True)}
    path = save(tmp_path, group, saved)
    found = load_file(path / "rank-00000.safetensors")
    assert found.keys() == saved.keys()
    assert all(bits(found[name]) == bits(saved[name]) for name in saved)


def test_extra_comes_back_and_loaded_says_what_was_taken(
    tmp_path: Path, group: ProcessGroup
) -> None:
    extra = {"position": 2**80, "rate": 1e-300, "nested": {"list": [1, None, True, "\u00e9\n"]}}
    path = save(tmp_path, group, {}, step=12, extra=extra)
    assert load(tmp_path, group, {}) == Loaded(12, extra, path, [])


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: 2}, {1, 2}, b"bytes", object(), torch.ones(1)]
)
def test_extra_that_json_would_change_is_refused(
    value: object, tmp_path: Path, group: ProcessGroup
) -> None:
    with pytest.raises(ValueError, match="extra must be JSON"):
        save(tmp_path, group, {}, extra={"key": [value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"), [({"keep": 0}, "keep"), ({"step": -1}, r"step \(-1\) must be at least 0")]
)
def test_impossible_arguments_are_refused(
    wrong: dict[str, int], message: str, tmp_path: Path, group: ProcessGroup
) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, group, {}, **wrong)


def test_nothing_to_load_is_none(tmp_path: Path, group: ProcessGroup) -> None:
    assert load_latest(tmp_path / "missing", tensors={}, group=group) is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert load_latest(tmp_path, tensors={}, group=group) is None


def test_the_latest_is_the_greatest_step_not_the_youngest_file(
    tmp_path: Path, group: ProcessGroup
) -> None:
    for step in (9, 100_000_000, 10):
        save(tmp_path, group, {"x": torch.tensor(step)}, step=step)
    x = torch.tensor(0)
    assert load(tmp_path, group, {"x": x}).step == 100_000_000
    assert int(x) == 100_000_000


def test_only_older_checkpoints_than_the_new_one_are_purged(
    tmp_path: Path, group: ProcessGroup
) -> None:
    for step in (1, 2, 3, 9):
        save(tmp_path, group, {}, step=step)
    save(tmp_path, group, {}, step=5, keep=2)
    assert names_in(tmp_path) == ["step-00000003", "step-00000005", "step-00000009"]


def test_multiples_of_a_step_are_kept_besides_the_newest(
    tmp_path: Path, group: ProcessGroup
) -> None:
    for step in (2, 4, 6, 4, 8, 10, 12, 14):
        tensors = {"step": torch.tensor(step)}
        save_checkpoint(
            tmp_path, step=step, tensors=tensors, extra={}, group=group, keep=2, keep_every=4
        )
    kept = ["step-00000004.1", "step-00000008", "step-00000012", "step-00000014"]
    assert names_in(tmp_path) == kept


def test_a_step_saved_again_overwrites_nothing_and_counts_as_newer(
    tmp_path: Path, group: ProcessGroup
) -> None:
    first = save(tmp_path, group, {"x": torch.tensor(1)}, step=4)
    held = (first / "rank-00000.safetensors").open("rb")
    again = save(tmp_path, group, {"x": torch.tensor(2)}, step=4)
    assert again.name == "step-00000004.1"
    with held:
        assert held.read().endswith((1).to_bytes(8, "little"))
    assert names_in(tmp_path) == [again.name]
    x = torch.tensor(0)
    assert load(tmp_path, group, {"x": x}).path == again
    assert int(x) == 2


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, group: ProcessGroup) -> None:
    parameter = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for step in range(4):
        before = bits(parameter)
        save(tmp_path, group, {"p": parameter}, step=step, keep=1)
        parameter.grad = torch.randn(50)
        optimizer.step()
        loaded = {"p": torch.zeros(50)}
        load(tmp_path, group, loaded)
        assert bits(loaded["p"]) == before


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "replicated": ((-1,), [Replicate()]),
    "grid": ((2, -1), [Shard(0), Shard(1)]),
    "swapped grid": ((2, -1), [Shard(1), Shard(0)]),
    "replicated rows": ((2, -1), [Replicate(), Shard(0)]),
    "rows of rows": ((2, -1), [Shard(0), Shard(0)]),
}


def whole(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(7, 6, generator=generator, dtype=torch.float64).to(dtype)


def laid_out(layout: str, fill: Tensor) -> Tensor:
    shape, placements = LAYOUTS[layout]
    world_size = dist.get_world_size()
    if world_size == 1:
        return fill.clone()
    known = -1 * torch.Size(shape).numel()
    mesh = init_device_mesh("cpu", tuple(world_size // known if n < 0 else n for n in shape))
    return distribute_tensor(fill.clone(), mesh, placements)


def rank_saves_all_layouts(path: Path) -> None:
    tensors = {f"{name}.w": laid_out(name, whole(name)) for name in LAYOUTS}
    tensors["plain"] = whole("plain", torch.bfloat16)
    world = dist.group.WORLD
    assert world is not None
    save(path, world, tensors, step=3, extra={"next_sequence": 77})


def rank_loads_under_other_layouts(path: Path, shifts: tuple[int, ...]) -> None:
    """Each tensor in a layout other than the one it was saved in."""
    for shift in shifts:
        load_shifted(path, shift)


def load_shifted(path: Path, shift: int) -> None:
    names = list(LAYOUTS)
    world = dist.group.WORLD
    assert world is not None
    targets, expected = {}, {}
    for position, name in enumerate(names):
        other = names[(position + shift) % len(names)]
        targets[f"{name}.w"] = laid_out(other, torch.zeros(7, 6))
        expected[f"{name}.w"] = laid_out(other, whole(name))
    targets["plain"] = torch.zeros(7, 6, dtype=torch.bfloat16)
    expected["plain"] = whole("plain", torch.bfloat16)
    loaded = load(path, world, targets)
    assert loaded.extra == {"next_sequence": 77}
    wrong = [name for name in targets if bits(targets[name]) != bits(expected[name])]
    assert not wrong


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(2, 4), (4, 2), (4, 4), (2, 1), (1, 4)], ids=str
)
def test_a_checkpoint_of_one_layout_loads_into_another(
    saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    run_distributed(rank_saves_all_layouts, tmp_path, world_size=saved_by)
    verify_checkpoint(tmp_path / "step-00000003")
    run_distributed(rank_loads_under_other_layouts, tmp_path, (0, 1, 2, 3), world_size=loaded_by)


def rank_saves_stages(path: Path, keep: int) -> None:
    """Pipeline: each rank has names of its own; a few tensors are everywhere."""
    world = dist.group.WORLD
    assert world is not None
    rank = world.rank()
    tensors = {f"stage{rank}.w": torch.full((1000,), float(rank))}
    tensors |= {f"shared{i}": torch.full((1000,), float(10 + i)) for i in range(8)}
    save(path, world, tensors, keep=keep)


def rank_loads_stages_of_the_next_rank(path: Path) -> None:
    world = dist.group.WORLD
    assert world is not None
    other = (world.rank() + 1) % world.size()
    tensors = {f"stage{other}.w": torch.zeros(1000)}
    tensors |= {f"shared{i}": torch.zeros(1000) for i in range(8)}
    load(path, world, tensors)
    assert bits(tensors[f"stage{other}.w"]) == bits(torch.full((1000,), float(other)))
    assert all(float(tensors[f"shared{i}"][-1]) == 10 + i for i in range(8))


def test_ranks_save_what_only_they_hold_and_share_out_what_all_hold(tmp_path: Path) -> None:
    run_distributed(rank_saves_stages, tmp_path, 1, world_size=4)
    sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)
    run_distributed(rank_loads_stages_of_the_next_rank, tmp_path, world_size=4)
