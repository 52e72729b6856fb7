"""Schedules over stages of unequal sizes, against one process, in float64."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from vtp_model import (
    B,
    H,
    S,
    batch,
    check_gradients,
    layout_of,
    loss_of,
    modules_of,
    reference,
    tp_group,
)

from hp_platform.testing import run_distributed
from hp_schedule import (
    Schedule,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    u_shape,
    validate,
    zbv,
)
from hp_schedule.runtime import PipelineScheduleRuntime, PipelineStage, TensorSpec
from hp_vtp import PipelineLayout, Replicated, Sharded, StageLayout
from hp_vtp.pipeline import StageTransport, multiplex, pipeline_rank
from hp_vtp.policy import EdgePolicy, Payload, Recorder
from hp_vtp.reductions import ReplicaGradients, global_grad_norm, loss_scale
from hp_vtp.topology.stages import cut
from hp_vtp.transport import TensorMeta, Transport

TOLERANCE = 1e-12
TIMEOUT = timedelta(seconds=40)
SIZES = ([1, 2, 3], [2, 3, 1], [1, 2, 2], [2, 4], [3, 1, 2])
META = TensorMeta((B, S, H), torch.float64)


def schedule_of(layout: PipelineLayout, num: int, *, build: Callable[..., Schedule]) -> Schedule:
    made = build(len(layout.stages), num_microbatches=num)
    schedule = multiplex(add_send_recv(made), layout)
    validate(schedule).raise_if_failed()
    return schedule


def train(
    layout: PipelineLayout,
    num: int,
    *,
    build: Callable[..., Schedule],
    dynamic: bool = False,
    policy: EdgePolicy | None = None,
) -> tuple[float, list[float], list[float]]:
    """Return the largest gradient error, this rank's losses, and the reference's."""
    group = tp_group(layout)
    modules = modules_of(layout, group)
    sequence = isinstance(layout.stages[0].boundary, Sharded)
    schedule = schedule_of(layout, num, build=build)
    expected_losses, expected = reference(layout.num_stages, num)
    metas = {stage: [META] for stage in range(1, layout.num_stages)} if sequence else None
    replicas = ReplicaGradients(layout)
    with Transport(layout, timeout=TIMEOUT, policy=policy) as transport:
        messages = StageTransport(transport, schedule, metas=metas)
        row = pipeline_rank(layout, transport.rank)
        tokens, targets = batch(num)
        if sequence and layout.num_stages - 1 in modules:
            size = layout.tp_sizes[layout.chain[-1]]
            me = layout.tp_rank_of(transport.rank)
            first, last = cut(S, size)[me : me + 2]
            targets = [target[:, first:last] for target in targets]
        stages = []
        for index in schedule.stages_of(row):
            logical = index % layout.num_stages
            spec: Sequence[TensorSpec] | TensorSpec | None = TensorSpec((B, S, H), torch.float64)
            if sequence and logical:
                spec = messages.input_spec(index)
            stages.append(
                PipelineStage(
                    modules[logical],
                    stage_index=index,
                    num_stages=schedule.num_stages,
                    device=torch.device("cpu"),
                    input_spec=None if dynamic or logical == 0 else spec,
                )
            )
        runtime = PipelineScheduleRuntime(
            stages,
            schedule,
            pipeline_rank=row,
            transport=messages,
            loss_fn=loss_of,
            loss_scale=loss_scale(layout, schedule.num_microbatches),
        )
        domains = layout.num_domains
        order = [m * domains + d for d in range(domains) for m in range(schedule.num_microbatches)]
        args = [[tokens[i]] for i in order]
        wanted = [targets[i] for i in order]
        if schedule.is_forward_only:
            result = runtime.evaluate_microbatches(args, targets=wanted)
        else:
            result = runtime.run_microbatches(args, targets=wanted)
        losses = [loss.item() for loss in result.losses]
        if sequence and losses:
            whole = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(whole, group=group)
            losses = whole.tolist()
        ends = set(modules) & {layout.num_stages - 1}
        expected_losses = [expected_losses[i] for i in order] if ends else []
        if schedule.is_forward_only:
            return 0.0, losses, expected_losses
        replicas.sum(p for module in modules.values() for p in module.parameters())
    replicas.close()
    return check_gradients(layout, modules, group, expected), losses, expected_losses


def check(layout: PipelineLayout, num: int, **options: object) -> None:
    error, losses, expected = train(layout, num, **options)  # type: ignore[arg-type]
    assert error <= TOLERANCE, f"{layout.tp_sizes} {layout.chain}: gradient error {error}"
    served = [loss for loss in losses if not math.isnan(loss)]
    assert len(served) == len(losses)
    if layout.num_domains == 1:
        torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=0)


def check_sizes(sizes: Sequence[int]) -> None:
    """Straight and U-shaped, replicated and sequence-parallel, in one launch."""
    for sequence in (False, True):
        check(layout_of(sizes, u_shape=True, sequence=sequence), 6, build=u_shape)
        check(layout_of(sizes, u_shape=False, sequence=sequence), 5, build=one_f_one_b)


@pytest.mark.sample("[1, 2, 2]", "[3, 1, 2]")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_losses_and_gradients_equal_those_of_one_process(sizes: Sequence[int]) -> None:
    run_distributed(check_sizes, sizes, world_size=sum(sizes), timeout=150)


def check_orders() -> None:
    """Fewer microbatches than stages, GPipe, shapes that travel, forward alone, PP = 2."""
    u, straight = (layout_of([1, 2], u_shape=is_u, sequence=False) for is_u in (True, False))
    for num in (1, 2, 4):
        check(u, num, build=u_shape)
        check(straight, num, build=one_f_one_b)
    check(straight, 3, build=gpipe)
    check(u, 3, build=u_shape, dynamic=True)
    check(straight, 3, build=forward_only)
    # Each stage has two parts of the model, so the chain goes round twice.
    for boundary in (Replicated(), Sharded(1)):
        stages = (StageLayout(((1,),), boundary), StageLayout(((0, 2),), boundary))
        looped = PipelineLayout(stages, (0, 1, 0, 1))
        check(looped, 4, build=interleaved_1f1b)


def test_short_batches_other_orders_and_forwards_alone_work() -> None:
    run_distributed(check_orders, world_size=3, timeout=150)


def check_domains(sizes: Sequence[int], dp: Sequence[int]) -> None:
    for sequence in (False, True):
        check(layout_of(sizes, u_shape=True, sequence=sequence, dp=dp), 6, build=u_shape)
    check(layout_of(sizes, u_shape=False, sequence=False, dp=dp), 4, build=one_f_one_b)


@pytest.mark.parametrize("dp", [[1, 2], [2, 1], [2, 2]], ids=str)
def test_one_stage_may_serve_several_domains_in_turn(dp: Sequence[int]) -> None:
    sizes = [1, 2]
    ranks = sum(size * count for size, count in zip(sizes, dp, strict=True))
    run_distributed(check_domains, sizes, dp, world_size=ranks, timeout=150)


def check_boundary() -> None:
    """Neither tokens nor labels leave the edge: only activations, gradients and shapes do."""
    layout = layout_of([1, 2], u_shape=True, sequence=False)
    recorder = Recorder(keep_values=True)
    policy = EdgePolicy(frozenset({0}), recorder=recorder)
    check(layout, 3, build=u_shape, policy=policy)
    crossings = recorder.crossings
    assert {c.payload for c in crossings} == set(Payload)
    tokens, targets = batch(3)
    secrets = {tuple(x.flatten().tolist()) for x in (*tokens, *targets)}
    for crossing in crossings:
        for value in crossing.values:
            assert tuple(value.flatten().tolist()) not in secrets
            if crossing.payload is not Payload.SHAPES:
                assert value.shape == (B, S, H)
                assert value.dtype == torch.float64


def test_tokens_and_labels_stay_on_the_edge() -> None:
    run_distributed(check_boundary, world_size=3, timeout=60)


def check_norms(u_shape_too: bool) -> None:
    layout = layout_of([1, 2], u_shape=u_shape_too, sequence=False)
    group, control = tp_group(layout), dist.group.WORLD
    assert control is not None
    modules = modules_of(layout, group)
    _, expected = reference(layout.num_stages, 2)
    generator = torch.Generator().manual_seed(3)
    grads = {
        name: torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for name, x in expected.items()
    }
    me = dist.get_rank()
    rank, ranks = layout.tp_rank_of(me), layout.tp_sizes[layout.stage_of(me)]
    parameters: dict[str, torch.nn.Parameter] = {}
    for stage, module in modules.items():
        for path, parameter in module.named_parameters():
            leaf = path.rpartition(".")[2]
            name = "embedding" if leaf == "embedding" else f"{stage}.{leaf}"
            grad = grads[name]
            if leaf != "embedding":
                grad = torch.tensor_split(
                    grad, cut(grad.shape[leaf == "down"], ranks)[1:-1], dim=int(leaf == "down")
                )[rank]
            parameter.grad = grad.clone()
            parameters[name if leaf != "embedding" else f"{stage}.embedding"] = parameter
    values = list(grads.values())
    if not u_shape_too:
        values.append(grads["embedding"])  # each end has one of its own
    for kind in (2.0, math.inf):
        wanted = torch.linalg.vector_norm(torch.cat([x.flatten() for x in values]), kind)
        norm = global_grad_norm(
            parameters,
            layout=layout,
            group=control,
            is_sharded=lambda name: not name.endswith("embedding"),
            norm_type=kind,
        )
        torch.testing.assert_close(norm, wanted, rtol=TOLERANCE, atol=0)
        if me == 2:
            some = next(iter(parameters.values()))
            assert some.grad is not None
            kept = some.grad.clone()
            some.grad.view(-1)[0] = math.nan
        assert global_grad_norm(
            parameters, layout=layout, group=control, is_sharded=lambda _: True, norm_type=kind
        ).isnan()
        if me == 2:
            some.grad = kept
    with pytest.raises(ValueError, match=r"norm_type \(3\) must be 2 or inf"):
        global_grad_norm({}, layout=layout, group=control, is_sharded=bool, norm_type=3)


@pytest.mark.parametrize("u", [True, False])
def test_the_gradient_norm_counts_every_parameter_once(u: bool) -> None:
    run_distributed(check_norms, u, world_size=3)


def test_units_and_multiplexed_rows() -> None:
    layout = PipelineLayout.u_shaped([1, 2], dp=[1, 2])
    assert [pipeline_rank(layout, rank) for rank in range(5)] == [0, 1, 1, 2, 2]
    schedule = multiplex(u_shape(2, num_microbatches=4), layout)
    assert schedule.stage_to_rank == (0, 1, 0, 0, 2, 0)
    assert schedule.chains == ((0, 1, 2), (3, 4, 5))
    assert schedule.num_microbatches == 2
    validate(add_send_recv(schedule)).raise_if_failed()
    with pytest.raises(ValueError, match=r"num_domains \(2\) must divide num_microbatches \(3\)"):
        multiplex(u_shape(2, num_microbatches=3), layout)
    with pytest.raises(ValueError, match="must equal the chain"):
        multiplex(one_f_one_b(2, num_microbatches=4), layout)


def check_domains_by_themselves() -> float:
    """Return the largest gradient error of this rank's linear layers."""
    layout = PipelineLayout.u_shaped([1, 2], dp=2)
    schedule = add_send_recv(zbv(2, num_microbatches=3))
    assert schedule.stage_to_rank == (0, 1, 1, 0)  # on rank 1 one stage hands over to the next

    def build() -> list[torch.nn.Module]:
        torch.manual_seed(0)
        return [torch.nn.Linear(H, H).double() for _ in range(4)]

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().sum()

    modules, expected = build(), build()
    with Transport(layout, timeout=TIMEOUT) as transport:
        domain = layout.replica_of(transport.rank)
        row = layout.stage_of(transport.rank)
        generator = torch.Generator().manual_seed(domain)
        inputs = [torch.randn(B, H, generator=generator).double() for _ in range(3)]
        metas = {position: [TensorMeta((B, H), torch.float64)] for position in (1, 2)}
        runtime = PipelineScheduleRuntime(
            [
                PipelineStage(
                    modules[index],
                    stage_index=index,
                    num_stages=4,
                    device=torch.device("cpu"),
                    input_spec=TensorSpec((B, H), torch.float64) if index else None,
                )
                for index in schedule.stages_of(row)
            ],
            schedule,
            pipeline_rank=row,
            transport=StageTransport(transport, schedule, metas=metas, domain=domain),
            loss_fn=loss_fn,
        )
        runtime.run_microbatches([[x] for x in inputs], targets=inputs)
    for x in inputs:
        loss_fn(torch.nn.Sequential(*expected)(x), x).backward()
    worst = 0.0
    for index in schedule.stages_of(row):
        pairs = zip(modules[index].parameters(), expected[index].parameters(), strict=True)
        for mine, theirs in pairs:
            assert mine.grad is not None
            assert theirs.grad is not None
            error = (mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
            worst = max(worst, float(error))
    return worst


def test_domains_may_run_a_schedule_each_and_stages_of_one_rank_follow_each_other() -> None:
    assert max(run_distributed(check_domains_by_themselves, world_size=6)) <= TOLERANCE


def check_refusals() -> None:
    u = add_send_recv(u_shape(2, num_microbatches=2))
    with Transport(layout_of([1, 2], u_shape=True, sequence=True)) as transport:
        with pytest.raises(ValueError, match=r"metas of logical stage 1 must be given"):
            StageTransport(transport, u)
        metas = {stage: [META] for stage in (1, 2)}
        messages = StageTransport(transport, u, metas=metas)
        me = transport.layout.tp_rank_of(transport.rank)
        if transport.layout.stage_of(transport.rank) == 1:
            ends = cut(S, 2)
            (spec,) = messages.input_spec(1)
            assert spec.shape == (B, ends[me + 1] - ends[me], H)
            stage = PipelineStage(
                torch.nn.Identity(),
                stage_index=1,
                num_stages=3,
                device=torch.device("cpu"),
                input_spec=TensorSpec((B, S, H), torch.float64),
            )
            runtime = PipelineScheduleRuntime([stage], u, pipeline_rank=1, transport=messages)
            with pytest.raises(ValueError, match=r"input_spec .* of stage 1 must be what metas"):
                runtime.run_microbatches([[], []])
    with Transport(layout_of([1, 2], u_shape=False, sequence=False)) as transport:
        with pytest.raises(ValueError, match=r"chain .* must equal the layout's \(\(0, 1\)\)"):
            StageTransport(transport, u)
        messages = StageTransport(transport, add_send_recv(one_f_one_b(2, num_microbatches=2)))
        with pytest.raises(ValueError, match="metas of logical stage 1 must be given"):
            messages.input_spec(1)
    with (
        Transport(layout_of([1, 1], u_shape=True, sequence=False, dp=[1, 2])) as transport,
        pytest.raises(
            ValueError, match=r"number of chains \(1\) and of rows \(2\) of the schedule"
        ),
    ):
        StageTransport(transport, u)


def test_schedules_and_layouts_that_do_not_fit_are_refused() -> None:
    run_distributed(check_refusals, world_size=3)
