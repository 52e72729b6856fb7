"""Train on real text with both ends of the model on the edge and the middle in the cloud.

Stage 0, the edge, owns the text: it has the embedding, the first and the last block and the loss.
The other stages are rented. With the default layout rank 0 is the edge, ranks 1 and 2 share the
block of the first cloud stage by tensor parallelism, and rank 3 is the second cloud stage. Only
activations, gradients and their shapes cross; the policy refuses everything else.

    pip install hp-vtp
    torchrun --nproc-per-node 4 u_shape.py [--text FILE] [--tp 1,2,1] [--steps 40]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_platform import new_group
from hp_schedule import Costs, add_send_recv
from hp_schedule.runtime import PipelineScheduleRuntime, PipelineStage, TensorSpec
from hp_vtp import PipelineLayout
from hp_vtp.pipeline import StageTransport, pipeline_rank
from hp_vtp.policy import EdgePolicy, Recorder
from hp_vtp.reductions import global_grad_norm
from hp_vtp.transport import Transport
from hp_vtp.u_shape import search_u_shape

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 32, 64, 4, 256
MICROBATCHES = 6


class _Copy(torch.autograd.Function):
    """Identity; the backward sums over the ranks of the stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sum over the ranks of the stage; the backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        del ctx
        return grad, None


copy_to: Any = _Copy.apply
sum_over: Any = _Sum.apply


class Block(nn.Module):
    """Attention and feed-forward; each rank has some of the heads and features."""

    def __init__(self, layer: int, *, rank: int, ranks: int, group: ProcessGroup) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layer)

        def part(rows: int, columns: int, dim: int) -> nn.Parameter:
            whole = torch.randn(rows, columns, generator=generator) / columns**0.5
            return nn.Parameter(whole.chunk(ranks, dim)[rank].clone())

        self.query, self.key, self.value = (part(WIDTH, WIDTH, 0) for _ in range(3))
        self.out = part(WIDTH, WIDTH, 1)
        self.up, self.down = part(4 * WIDTH, WIDTH, 0), part(WIDTH, 4 * WIDTH, 1)
        self.heads, self.group = HEADS // ranks, group

    def forward(self, x: Tensor) -> Tensor:
        """Map activations [batch, length, width] to such."""
        y = copy_to(F.layer_norm(x, (WIDTH,)), self.group)
        q, k, v = (
            (y @ weight.t()).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for weight in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + sum_over(mixed @ self.out.t(), self.group)
        y = copy_to(F.layer_norm(x, (WIDTH,)), self.group)
        z: Tensor = x + sum_over(F.gelu(y @ self.up.t()) @ self.down.t(), self.group)
        return z


class First(nn.Module):
    """Embedding and the first block."""

    def __init__(self, embedding: nn.Parameter, block: Block) -> None:
        super().__init__()
        self.embedding, self.block = embedding, block
        generator = torch.Generator().manual_seed(1234)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH, generator=generator) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to activations."""
        y: Tensor = self.block(self.embedding[tokens] + self.position)
        return y


class Last(nn.Module):
    """The last block and the logits, tied to the embedding on the same rank."""

    def __init__(self, embedding: nn.Parameter, block: Block) -> None:
        super().__init__()
        self.embedding, self.block = embedding, block

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to logits [batch, length, vocabulary]."""
        return F.layer_norm(self.block(x), (WIDTH,)) @ self.embedding.t()


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over the tokens of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_modules(layout: PipelineLayout, group: ProcessGroup) -> dict[int, nn.Module]:
    """This rank's part of the model by logical stage."""
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    blocks = {
        stage: Block(stage, rank=rank, ranks=ranks, group=group)
        for stage in layout.logical_stages_of(me)
    }
    if 0 not in blocks:
        return dict(blocks)
    last = layout.num_stages - 1
    generator = torch.Generator().manual_seed(99)
    embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.1)
    return {0: First(embedding, blocks[0]), last: Last(embedding, blocks[last])}


def draw(data: Tensor | None, generator: torch.Generator) -> tuple[list[Tensor], Tensor | None]:
    """Inputs and targets of a microbatch, on the edge; nothing elsewhere."""
    if data is None:
        return [], None
    starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
    cut = data[starts + torch.arange(LENGTH + 1)]
    return [cut[:, :-1]], cut[:, 1:]


def train(tp_sizes: Sequence[int], text: Path | None, steps: int) -> list[float]:
    """Train on all ranks; return the losses on the edge, nothing elsewhere."""
    layout = PipelineLayout.u_shaped(tp_sizes)
    layout.require_divisible({"heads": HEADS, "width": WIDTH})
    me, stages = dist.get_rank(), len(layout.stages)
    everyone = new_group([list(range(layout.world_size))], name="control", backend="gloo")
    group = new_group([list(layout.ranks_of(stage)) for stage in range(stages)], name="tp")
    if group is None or everyone is None:
        raise RuntimeError("every rank must have a stage")
    modules = make_modules(layout, group)
    parameters = {
        f"{stage}.{name}": parameter
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    unique = list({id(parameter): parameter for parameter in parameters.values()}.values())
    optimizer = torch.optim.AdamW(unique, lr=3e-3)
    costs = Costs(forward=[1.0] * layout.num_stages, latency=1.0)
    order = search_u_shape(stages, num_microbatches=MICROBATCHES, costs=costs)
    schedule = add_send_recv(order.schedule(stages, MICROBATCHES), costs=costs)
    recorder = Recorder()
    spec = TensorSpec((BATCH, LENGTH, WIDTH))
    data = None
    if layout.stage_of(me) == 0:  # nobody else opens the file
        source = text or Path(__file__).parent.parent / "LICENSE"
        data = torch.tensor(list(source.read_bytes()))
    generator = torch.Generator().manual_seed(0)
    losses = []
    policy = EdgePolicy(frozenset({0}), recorder=recorder)
    with Transport(layout, policy=policy) as transport:
        runtime = PipelineScheduleRuntime(
            [
                PipelineStage(
                    module,
                    stage_index=stage,
                    num_stages=layout.num_stages,
                    device=torch.device("cpu"),
                    input_spec=spec if stage else None,
                )
                for stage, module in modules.items()
            ],
            schedule,
            pipeline_rank=pipeline_rank(layout, me),
            transport=StageTransport(transport, schedule),
            loss_fn=loss_of,
            loss_scale=1 / MICROBATCHES,
        )
        for step in range(steps):
            batch = [draw(data, generator) for _ in range(MICROBATCHES)]
            result = runtime.run_microbatches(
                [inputs for inputs, _ in batch],
                targets=[target for _, target in batch],
                record=False,
            )
            norm = global_grad_norm(
                parameters,
                layout=layout,
                group=everyone,
                is_sharded=lambda name: not name.endswith(("embedding", "position")),
            )
            nn.utils.clip_grads_with_norm_(unique, 1.0, norm)
            optimizer.step()
            optimizer.zero_grad()
            if result.losses:
                losses.append(torch.stack(list(result.losses)).mean().item())
                if step % 10 == 0 or step == steps - 1:
                    print(f"step {step}: loss {losses[-1]:.3f}, gradient norm {norm.item():.3f}")
    if data is not None:
        kinds = sorted({str(crossing.payload) for crossing in recorder.crossings})
        print(f"{len(recorder.crossings)} transfers left the edge: {', '.join(kinds)}")
    return losses


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="what to learn; default the licence")
    parser.add_argument("--tp", default="1,2,1", help="TP sizes of the stages, the edge first")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train([int(size) for size in args.tp.split(",")], args.text, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
