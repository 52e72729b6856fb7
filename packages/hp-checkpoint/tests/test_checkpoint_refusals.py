from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import load_latest, save_checkpoint
from hp_platform.testing import run_distributed


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def save(path: Path, tensors: dict[str, Tensor], step: int = 1) -> Path:
    return save_checkpoint(path, step=step, tensors=tensors, extra={}, group=world(), keep=3)


def refusal(path: Path, tensors: dict[str, Tensor]) -> str:
    """Return the error of a load; check that `tensors` and files are unchanged."""
    before = {name: x.clone() for name, x in tensors.items() if x.device.type != "meta"}
    names = sorted(str(entry) for entry in path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        load_latest(path, tensors=tensors, group=world())
    assert all(torch.equal(tensors[name], x) for name, x in before.items())
    assert sorted(str(entry) for entry in path.rglob("*")) == names
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    return str(caught.value)


@pytest.mark.usefixtures("group")
def test_another_dtype_is_refused_instead_of_cast(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    message = refusal(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    assert message.endswith(
        "step-00000001: rank 0: tensor b: dtype (torch.bfloat16) must equal that of the checkpoint "
        "(torch.float32)"
    )


@pytest.mark.usefixtures("group")
def test_another_shape_of_as_many_elements_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2, 3)})
    message = refusal(tmp_path, {"a": torch.zeros(3, 2)})
    assert "tensor a: shape ([3, 2]) must equal that of the checkpoint ([2, 3])" in message


@pytest.mark.usefixtures("group")
def test_tensors_missing_from_the_checkpoint_are_listed(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1)})
    wanted = {name: torch.zeros(1) for name in "abc"}
    assert refusal(tmp_path, wanted).endswith("the checkpoint lacks tensors b, c")


@pytest.mark.usefixtures("group")
def test_tensors_that_only_the_checkpoint_has_are_listed(tmp_path: Path) -> None:
    save(tmp_path, {f"t{i:02}": torch.ones(1) for i in range(12)})
    message = refusal(tmp_path, {"t00": torch.zeros(1)})
    assert "has tensors t01, t02, t03, t04, t05, t06, t07, t08 and 3 more, which no rank" in message


@pytest.mark.usefixtures("group")
def test_a_tensor_on_the_meta_device_is_refused_instead_of_left_alone(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1)})
    message = refusal(tmp_path, {"a": torch.empty(1, device="meta")})
    assert "tensor a: layout (torch.strided) on meta must be strided memory" in message


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("c", torch.ones(2, dtype=torch.complex64), r"tensor c: dtype \(torch.complex64\) must be"),
        ("s", torch.ones(2).to_sparse(), r"tensor s: layout \(torch.sparse_coo\)"),
        ("n", "text", r"tensor n: type \(str\) must be Tensor"),
        ("__metadata__", torch.ones(1), "name '__metadata__' must be printable"),
        ("", torch.ones(1), "name '' must be printable"),
        ("a\nb", torch.ones(1), "must be printable"),
        ("x" * 513, torch.ones(1), "must be printable, of 1 to 512 characters"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    name: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, {"good": torch.ones(1), name: tensor})
    assert not list(tmp_path.iterdir())


def rank_differs(path: Path) -> list[str]:
    """Messages of saves for which the ranks do not agree what a tensor is."""
    rank = world().rank()
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.ones(2, 2)
    sharded = DTensor.from_local(rows, mesh, [Shard(0)])
    cases: list[Tensor] = [
        torch.ones(2 + rank),
        torch.ones(2).to(torch.float64 if rank else torch.float32),
        DTensor.from_local(rows, mesh, [Replicate()]) if rank else rows,
        DTensor.from_local(rows, mesh, [Partial()]),
        DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size([5, 2]), stride=(2, 1)),
    ]
    messages = []
    # Rank 0 alone holds a tensor with the name that the first part of `w` has in its file.
    clash = {"w": sharded} | ({} if rank else {"w@0,0": torch.ones(9)})
    for tensors in [*({"w": tensor} for tensor in cases), clash]:
        with pytest.raises(CheckpointError) as caught:
            save(path, {"fine": torch.ones(3), **tensors})
        messages.append(str(caught.value))
    dist.barrier()  # the first rank removes what was written
    assert not list(path.iterdir())
    return messages


def test_ranks_that_differ_over_a_tensor_are_refused_on_all_of_them(tmp_path: Path) -> None:
    one, other = run_distributed(rank_differs, tmp_path, world_size=2)
    assert one == other
    expected = [
        "tensor w: Tensor [3] torch.float32 of rank 1 must equal Tensor [2] torch.float32 of rank",
        "tensor w: Tensor [2] torch.float64 of rank 1 must equal Tensor [2] torch.float32 of rank",
        "tensor w: DTensor [2, 2] torch.float32 of rank 1 must equal Tensor [2, 2] torch.float32",
        "rank 0: tensor w: placements ((Partial(sum),)) must be Shard or Replicate",
        "tensor w: shape of the local part ([2, 2]) must be what its placements give",
        "file rank-00000.safetensors: key w@0,0 must appear once",
    ]
    for message, part in zip(one, expected, strict=True):
        assert part in message


def rank_one_wants_another_dtype(path: Path) -> str:
    dtype = torch.float64 if world().rank() == 1 else torch.float32
    return refusal(path, {"a": torch.zeros(2, dtype=dtype)})


def rank_one_is_refused_extra(path: Path) -> str:
    extra = {"x": float("nan") if world().rank() == 1 else 0.0}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        save_checkpoint(path, step=5, tensors={}, extra=extra, group=world(), keep=1)
    return str(caught.value)


def test_a_refusal_of_one_rank_reaches_all_before_any_tensor_is_touched(tmp_path: Path) -> None:
    run_distributed(save, tmp_path, {"a": torch.ones(2)}, world_size=2)
    one, other = run_distributed(rank_one_wants_another_dtype, tmp_path, world_size=2)
    assert one == other
    assert "rank 1: tensor a: dtype (torch.float64)" in one


def test_wrong_arguments_on_one_rank_reach_all(tmp_path: Path) -> None:
    one, other = run_distributed(rank_one_is_refused_extra, tmp_path, world_size=2)
    assert "rank 1 failed before saving a checkpoint: ValueError: extra must be JSON" in one
    assert other.startswith("extra must be JSON")
