"""FSDP2 over a stage: gradients are sums over all ranks, whichever ranks shard and keep copies."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dry import active_device, run_ranks
from hp_dry.trace import Collective
from hp_platform import RankInfo, Runtime, initialize, shutdown
from hp_platform.testing import compare, run_distributed
from hp_trainer.config import MeshConfig, ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.layout.mesh import Mesh, build_mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.model import DropoutKey, Microbatch, TransformerStage
from hp_trainer.model.parameters import Parameter, declared, named_parameters
from hp_trainer.model.spreading import shard

VOCABULARY, POSITIONS = 32, 8
KEYS = {"model.num_layers": 2, "model.num_experts": 4, "model.top_k": 2}


def model() -> ModelConfig:
    return resolve("debug-qwen3-moe", KEYS.items(), env={}).config.model


def build(dtype: torch.dtype) -> TransformerStage:
    config = model()
    with torch.device("meta"):
        layers = range(config.num_layers)
        stage = TransformerStage(
            config, VOCABULARY, layers=layers, first=True, last=True, compute_dtype=dtype
        )
    return stage.to(torch.promote_types(dtype, torch.float32))


def backward(stage: TransformerStage, rows: Tensor) -> None:
    """Take the sum of the losses of some sequences."""
    key = DropoutKey(0, 0, torch.arange(len(rows)), torch.arange(POSITIONS))
    logits = stage(rows, microbatch=Microbatch(1, key))
    logits.float().square().sum().backward()


def sequences(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (number, POSITIONS), generator=generator)


def one_process(number: int) -> dict[str, Tensor]:
    stage = build(torch.float64)
    stage.to_empty(device="cpu")
    found = named_parameters(stage)
    stage.initialize(found, model(), seed=0)
    backward(stage, sequences(number))
    return {p.name: p.tensor.grad for p in found if p.tensor.grad is not None}


def sharded(
    runtime: Runtime, config: MeshConfig, dtype: torch.dtype, *, by_block: bool
) -> tuple[TransformerStage, Mesh, list[Parameter]]:
    mesh = build_mesh(Layout.of(config), runtime, timeout=timedelta(seconds=60))
    stage = build(dtype)
    whole = declared(stage)
    shard(stage, mesh, by_block=by_block)
    stage.to_empty(device=runtime.device)
    found = named_parameters(stage, whole, mesh)
    stage.initialize(found, model(), seed=0)
    return stage, mesh, found


def gradient(parameter: Parameter, mesh: Mesh) -> Tensor:
    """The part that is here, summed over those ranks over which FSDP does not."""
    given = parameter.tensor.grad
    assert given is not None
    here = given.to_local() if isinstance(given, DTensor) else given
    for group in parameter.unsummed:
        dist.all_reduce(here, group=mesh.groups[group])
    return here


def compare_gradients(address: str, config: MeshConfig) -> list[str]:
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    told, expected = [], one_process(info.world_size)
    for by_block in (False, True):
        stage, mesh, found = sharded(runtime, config, torch.float64, by_block=by_block)
        backward(stage, sequences(info.world_size)[info.rank : info.rank + 1])
        here = {p.name: gradient(p, mesh) for p in found}
        wanted = {}
        for p in found:
            part = expected[p.name]
            for dim, (start, end) in enumerate(p.span):
                part = part.narrow(dim, start, end - start)
            wanted[p.name] = part
        result = compare(here, wanted, bound=1e-12)
        told += [] if result.ok else [str(result)]
    shutdown()
    return told


@pytest.mark.sample("1-2", "2-1", "2-2")
@pytest.mark.parametrize(("copies", "shards"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on gathers of two axes
def test_gradients_are_the_sums_of_one_process(copies: int, shards: int, tmp_path: Path) -> None:
    config, size = MeshConfig(dp_replicate=copies, dp_shard=shards), copies * shards
    address = f"file://{tmp_path}/meeting"
    found = run_distributed(compare_gradients, address, config, world_size=size, timeout=120)
    assert found == [[]] * size


def reductions(copies: int, shards: int) -> list[str]:
    """What NCCL would be asked for where ranks reduce, by stage and by block."""
    runtime = initialize(device_type="cuda")
    config, events = MeshConfig(dp_replicate=copies, dp_shard=shards), active_device().trace.events
    for by_block in (False, True):
        stage, *_ = sharded(runtime, config, torch.bfloat16, by_block=by_block)
        backward(stage, sequences(1).to(runtime.device))
    found = (e for e in events if isinstance(e, Collective) and e.op.startswith(("all_r", "red")))
    return sorted({f"{e.op} {e.detail}" for e in found})


@pytest.mark.sample("2-2")
@pytest.mark.parametrize(("copies", "shards"), [(1, 2), (2, 2)])
def test_gradients_are_only_summed_on_gpus(copies: int, shards: int) -> None:
    size = copies * shards
    run = run_ranks(reductions, copies, shards, world_size=size, representatives={0: range(size)})
    assert set(run.results[0]) == {"all_reduce sum", "reduce_scatter sum"}
