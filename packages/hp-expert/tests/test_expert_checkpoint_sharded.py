"""Experts that are sharded over a mesh: loaded, named, saved and resharded to the same bits."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import hp_expert.checkpoint.save as saving
from hp_checkpoint.save import Written
from hp_expert import GroupedExperts, from_hf, load_experts, save_experts, to_hf
from hp_platform.testing import run_distributed

EXPERTS, DIM, HIDDEN = 8, 3, 4
DIMS = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": None, "b3": 1}


def weights() -> dict[str, Tensor]:
    """Stacked, the whole of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "w1": (EXPERTS, HIDDEN, DIM),
        "w2": (EXPERTS, DIM, HIDDEN),
        "w3": (EXPERTS, HIDDEN, DIM),
        "b1": (EXPERTS, HIDDEN),
        "b2": (EXPERTS, DIM),
        "b3": (EXPERTS, HIDDEN),
    }
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


class Experts(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def model(tensors: dict[str, Tensor]) -> nn.Module:
    return nn.ModuleDict({"experts": Experts(tensors)})


def placements(name: str, mesh: DeviceMesh) -> list[Placement]:
    """Experts along "ep", the hidden dim along "tp"."""
    hidden = DIMS[name]
    along_tp = Replicate() if hidden is None else Shard(hidden)
    return [Shard(0) if axis == "ep" else along_tp for axis in mesh.mesh_dim_names or ()]


def sharded(mesh: DeviceMesh, *, empty: bool = False) -> nn.Module:
    tensors = {n: torch.zeros_like(t) if empty else t for n, t in weights().items()}
    return model({n: distribute_tensor(t, mesh, placements(n, mesh)) for n, t in tensors.items()})


def mesh_of_size(ep: int, tp: int) -> DeviceMesh:
    if tp == 1:
        return init_device_mesh("cpu", (ep,), mesh_dim_names=("ep",))
    return init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))


def is_whole(module: nn.Module) -> bool:
    """Tell whether a module has the bits of `weights`, sharded or not."""
    parameters = dict(module.named_parameters())
    for name, expected in weights().items():
        found = parameters[f"experts.{name}"]
        assert isinstance(found, DTensor)
        if not torch.equal(found.full_tensor(), expected):
            return False
    return True


def through_files(ep: int, tp: int, source: Path, target: Path) -> int:
    """Load and save; return how many files this rank wrote."""
    mesh = mesh_of_size(ep, tp)
    module = sharded(mesh, empty=True)
    load_experts(module, source, group=dist.group.WORLD)
    assert is_whole(module)
    written: list[Path] = []
    write = saving._write

    def spy(tensors: Mapping[str, Tensor], path: Path, head: tuple[str, int]) -> Written:
        written.append(path)
        return write(tensors, path, head)

    saving._write = spy
    save_experts(module, target, group=dist.group.WORLD)
    return len(written)


def read(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_a_mesh_of_experts_and_hidden_dim_loads_and_saves_the_same_bits(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    expected = to_hf(model(weights()).state_dict())
    save_file({k: t.detach().contiguous() for k, t in expected.items()}, source / "a.safetensors")
    # One of the ranks that share an expert writes it.
    assert run_distributed(through_files, 2, 2, source, target, world_size=4) == [1, 0, 1, 0]
    found = read(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def under_fsdp(source: Path) -> bool:
    """Experts over "ep", what is left of each parameter over "dp"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    module = sharded(mesh["ep"], empty=True)
    fully_shard(module.get_submodule("experts"), mesh=mesh["dp"])
    load_experts(module, source, group=dist.group.WORLD)
    # FSDP2 keeps a padded copy, whose view the parameter is.
    return is_whole(module)


def test_experts_under_fsdp_are_loaded(tmp_path: Path) -> None:
    single = to_hf(model(weights()).state_dict())
    save_file({k: t.detach().contiguous() for k, t in single.items()}, tmp_path / "a.safetensors")
    assert all(run_distributed(under_fsdp, tmp_path, world_size=4))


def there_and_back() -> None:
    module = sharded(mesh_of_size(2, 2))
    state = {name: parameter.detach() for name, parameter in module.named_parameters()}
    single = to_hf(state)
    # Of 8 experts 4 are here, and of each half of its hidden dim.
    assert len(single) == 4 * 6
    first = 4 * (dist.get_rank() // 2)
    part = single[f"experts.{first}.gate_proj.weight"]
    assert isinstance(part, DTensor)
    assert (part.shape, part.to_local().shape) == ((HIDDEN, DIM), (HIDDEN // 2, DIM))
    back = from_hf(single, state)
    for key, expected in state.items():
        assert isinstance(expected, DTensor)
        found = back[key]
        assert isinstance(found, DTensor)
        assert found.placements == expected.placements
        assert torch.equal(found.to_local(), expected.to_local())
    # A rank that has whole projections takes its part of them.
    whole = to_hf(weights())
    assert torch.equal(
        _local(from_hf(whole, {"w1": state["experts.w1"], **_others(state)})["w1"]),
        _local(state["experts.w1"]),
    )


def _others(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("experts."): t for key, t in state.items() if not key.endswith("w1")}


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def test_a_mesh_names_what_is_here_and_stacks_it_again() -> None:
    run_distributed(there_and_back, world_size=4)


def reshard(ep: int, source: Path | None, target: Path) -> bool:
    """Load with torch's own checkpoints, if there is one, and save."""
    module = sharded(mesh_of_size(ep, 1), empty=source is not None)
    if source is not None:
        state = module.state_dict()
        load(state, checkpoint_id=source)
    save(module.state_dict(), checkpoint_id=target)
    return is_whole(module)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_torch_checkpoints_reshard_from_four_ranks_to_two_to_one(tmp_path: Path) -> None:
    source = None
    for ranks in (4, 2, 1):
        target = tmp_path / str(ranks)
        assert all(run_distributed(reshard, ranks, source, target, world_size=ranks))
        source = target


def fused_across_rows() -> None:
    mesh = mesh_of_size(2, 1)
    fused = {
        "experts.gate_up_proj": distribute_tensor(torch.ones(2, 4, 3), mesh, [Shard(1)]),
        "experts.down_proj": distribute_tensor(torch.ones(2, 3, 2), mesh, [Shard(2)]),
    }
    with pytest.raises(ValueError, match="must not be sharded across gate and up rows"):
        to_hf(fused)


def test_gate_and_up_rows_that_are_sharded_together_are_refused() -> None:
    run_distributed(fused_across_rows, world_size=2)


def test_experts_of_this_package_are_found() -> None:
    assert len(to_hf(GroupedExperts(2, DIM, HIDDEN).state_dict())) == 2 * 3
