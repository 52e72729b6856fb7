"""What layouts take: bytes of ranks, seconds of stages and of exchanges."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hp_base.beside_tensors import GPU_MARGIN, Held
from hp_base.dtypes import BYTES
from hp_plan import MACHINES, Spread, estimate
from hp_plan.costs.memory import (
    buffer_bytes,
    local_elements,
    message_bytes,
    padding,
    static_memory,
)
from hp_plan.costs.modules import stage, whole_model
from hp_plan.costs.work import Kernel, Kernels, Weight
from hp_plan.layouts.report import as_dict, name
from hp_plan.price.estimate import Plan, planned
from hp_plan.price.rates import Rates, Routed
from hp_plan.price.traffic import (
    activation_transfers,
    edge_link,
    expert_exchanges,
    expert_transfer,
    gradient_transfers,
    shard_transfer,
)
from hp_schedule import Precedence, Schedule, simulate
from hp_trainer.config import Config
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.layout.communicators import held
from hp_trainer.layout.parameter import ParameterSpec
from hp_trainer.layout.ranks import Layout, StageLayout
from hp_trainer.layout.schedules import KINDS

VOCAB = 256
H100 = MACHINES["h100"]
TENSORS_ALONE = H100.with_values(**dict.fromkeys(GPU_MARGIN, 0.0))


def config_of(keys: dict[str, Any] | None = None) -> Config:
    return resolve("quickstart", (keys or {}).items(), env={}).config


@pytest.mark.parametrize(("rows", "shards"), [(8, 2), (7, 2), (5, 4), (3, 4), (1, 8)])
def test_shards_of_a_parameter_are_as_torch_chunks_it(rows: int, shards: int) -> None:
    chunks = torch.empty(rows, 3).chunk(shards)
    layout = StageLayout(dp_shard=shards)
    weight = Weight("w", (rows, 3))
    assert local_elements(weight, layout) == chunks[0].numel()
    last = chunks[-1].numel() if len(chunks) == shards else 0
    assert local_elements(weight, layout, first=False) == last


def test_experts_fewer_than_shards_are_cut_inside_where_that_divides_them() -> None:
    expert = ParameterSpec(is_expert=True, hidden_dim=1)
    layout = StageLayout(dp_shard=4)
    assert layout.expert_shard == 4
    assert local_elements(Weight("w1", (2, 8, 3), expert), layout) == 2 * 2 * 3
    # Six rows are no multiple of four: then whole experts, one on each of the first two ranks.
    assert local_elements(Weight("w1", (2, 6, 3), expert), layout) == 1 * 6 * 3
    assert local_elements(Weight("w1", (2, 6, 3), expert), layout, first=False) == 0


def test_a_table_of_two_stages_has_one_pair_of_moments_and_two_gradients() -> None:
    keys = {"model.tie_embeddings": True, "mesh.pp": 1, "mesh.ep": 1, "mesh.dp_replicate": 1}
    config = config_of(keys | {"pipeline.stages_per_rank": 2})
    ends = [
        stage(config, VOCAB, layers=range(2), first=True, last=False),
        stage(config, VOCAB, layers=range(2, 4), first=False, last=True),
    ]
    elements = sum(weight.size for end in ends for weight in end.weights)
    table = VOCAB * config.model.dim
    parameters, gradients, optimizer = static_memory(config, ends, StageLayout())
    assert parameters == 4 * (elements - table)
    assert gradients == 4 * elements
    num_updated = sum(len(end.weights) for end in ends) - 1
    assert optimizer == 8 * (elements - table) + 4 * num_updated


def test_bf16_is_trained_on_fp32_masters() -> None:
    work = whole_model(config_of(), VOCAB)
    bf16, fp32, fp64 = (
        static_memory(config_of({"train.dtype": dtype}), [work], StageLayout())
        for dtype in ("bfloat16", "float32", "float64")
    )
    elements = sum(weight.size for weight in work.weights)
    assert bf16 == fp32 == (4 * elements, 4 * elements, 8 * elements + 4 * len(work.weights))
    assert fp64[0] == 8 * elements


def test_sums_over_replicas_send_each_byte_twice_but_for_ones_own_share() -> None:
    config = config_of({"mesh.pp": 1, "pipeline.stages_per_rank": 1, "mesh.ep": 1})
    config = with_keys(config, {"mesh.dp_replicate": 4})
    work = whole_model(config, VOCAB)
    transfers = gradient_transfers(config, [work], Layout.of(config.mesh).stages[0], H100)
    elements = sum(weight.size for weight in work.weights)
    assert sum(t.bytes for t in transfers) == pytest.approx(2 * 3 / 4 * 4 * elements)
    assert not any(t.between_nodes for t in transfers)


def test_ranks_of_a_node_share_what_they_gather_from_other_nodes() -> None:
    config = config_of({"mesh.pp": 1, "pipeline.stages_per_rank": 1, "mesh.ep": 1})
    work, layout = whole_model(config, VOCAB), StageLayout(dp_shard=16)
    fast, slow = H100.bandwidth, 1e-3 * H100.bandwidth
    machine = H100.with_values(node_bandwidth=slow, latency=0.0, node_latency=0.0)
    for node_size, per_rank, rate in ((16, 1.0, fast), (8, 1 / 8, slow), (1, 15.0, slow)):
        found = shard_transfer(
            config, work, layout, machine.with_values(node_size=node_size), what="reduced"
        )
        assert found.between_nodes is (node_size < 16)
        # Of 16 parts each rank gets 15; those of 8 other ranks come in once for all 8 of a node.
        size = found.bytes / 15 * (8 * per_rank if node_size == 8 else 15.0)
        assert found.seconds == pytest.approx(size / rate)


def test_stages_that_are_alike_are_priced_where_they_are() -> None:
    # Of the nodes of six devices, the second stage of four is on two.
    mesh = {"mesh.pp": 4, "mesh.dp_replicate": 1, "mesh.dp_shard": 4, "mesh.ep": 1}
    pipeline = {"pipeline.stages_per_rank": 1, "pipeline.schedule": "1f1b"}
    config = config_of({**mesh, **pipeline, "mesh.gather": "stage"})
    plan = planned(config, H100.with_values(node_size=6), vocab_size=VOCAB)
    gathers = plan.costs(plan.schedule()).unshard
    assert isinstance(gathers, list)
    assert plan.stages[1] is plan.stages[2]
    assert gathers[1] > 2 * gathers[2] > 0


LAYOUTS = [
    {"pipeline.schedule": "interleaved_1f1b"},
    {"pipeline.schedule": "zbv", "train.microbatch_size": 2},
    {"mesh.dp_replicate": 1, "mesh.dp_shard": 4, "mesh.ep": 4, "train.microbatch_size": 1},
]


@pytest.mark.parametrize("keys", LAYOUTS)
def test_the_parts_of_a_step_add_up_to_it(keys: dict[str, object]) -> None:
    found = estimate(config_of(keys), H100, vocab_size=VOCAB)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert 0 <= found.bubble < 1
    assert found.memory.total > 0


def test_a_pipeline_without_messages_is_priced_as_the_simulator_does() -> None:
    config = config_of({"mesh.dp_replicate": 1, "mesh.ep": 1})
    free = H100.with_values(bandwidth=1e30, latency=0.0, memory_bandwidth=1e30)
    plan = planned(config, free, vocab_size=VOCAB)
    found = plan.estimate()
    simulated = simulate(plan.schedule(), plan.costs(plan.schedule()))
    assert found.seconds == pytest.approx(simulated.makespan)
    assert found.memory.activations == round(max(simulated.peak_activations))


@pytest.mark.parametrize("schedule", ["1f1b", "u_shape"])
def test_stages_of_different_sizes_are_priced_by_their_own_ranks(schedule: str) -> None:
    keys: dict[str, object] = {"pipeline.schedule": schedule, "pipeline.stages_per_rank": 1}
    keys |= {"mesh.ep": 1, "mesh.dp_replicate": 1, "model.num_layers": 6}
    quick = TENSORS_ALONE.with_values(launch_seconds=1e-12)  # hosts do not get in the way
    even, uneven = (
        planned(config_of(keys | mesh), quick, vocab_size=VOCAB)
        for mesh in ({"mesh.tp": 2}, {"mesh.stage_tp": (1, 2)})
    )
    for one, other, place in zip(uneven.prices, even.prices, uneven.places, strict=True):
        mine, theirs = one.weight_grad, other.weight_grad
        assert mine == theirs if place.tp == 2 else mine > theirs
    found = uneven.estimate()
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    # The rank that has its stages alone holds most, and sends whole activations.
    assert found.memory.parameters > even.estimate().memory.parameters
    sent = {transfer.purpose: transfer.bytes for transfer in found.transfers}
    microbatches = uneven.num_microbatches
    directions = 2 if schedule == "u_shape" else 1
    whole = message_bytes(uneven.config, uneven.places[0])
    assert sent["pipeline"] == directions * microbatches * whole
    link = edge_link(uneven.config, uneven.layout, H100, source=0, destination=1)
    assert (link.bytes, link.messages) == (whole, 2)


def test_slices_of_stages_that_do_not_divide_each_other_meet_where_they_overlap() -> None:
    config = with_keys(config_of(), {"mesh.ep": 1, "mesh.stage_tp": (2, 3)})
    layout = Layout.of(config.mesh)
    link = edge_link(config, layout, H100, source=0, destination=1)
    assert link.messages == 2  # of four in all
    assert link.bytes == message_bytes(config, layout.stages[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_giving_up_microbatches_saves_memory_at_a_price(schedule: str) -> None:
    keys = {
        "mesh.pp": 2,
        "mesh.dp_replicate": 1,
        "mesh.ep": 1,
        "pipeline.stages_per_rank": 1,
        "pipeline.schedule": schedule,
        "train.microbatch_size": 4,
    }
    found = {}
    for retention in ("keep", "recompute", "offload"):
        chosen = config_of({**keys, "pipeline.retention": retention})
        plan = planned(chosen, H100, vocab_size=VOCAB)
        found[retention] = plan.estimate()
        steps = {step.type.name for row in plan.schedule().steps for step in row if step}
        assert ("RECOMPUTE" in steps) is (retention == "recompute")
        assert ("OFFLOAD" in steps) is (retention == "offload")
    keep, again, away = found.values()
    assert again.memory.activations < keep.memory.activations
    assert again.seconds > keep.seconds
    slow = H100.with_values(host_bandwidth=1e6)
    late = planned(away.config, slow, vocab_size=VOCAB).estimate()
    assert late.seconds > away.seconds
    fast = H100.with_values(host_bandwidth=1e15)
    free = planned(away.config, fast, vocab_size=VOCAB).estimate()
    # Two forwards in a row leave the first copy no time at all.
    least = 0.9 if schedule == "gpipe" else 1.0
    assert free.memory.activations <= least * keep.memory.activations
    assert free.seconds == pytest.approx(keep.seconds, rel=1e-4)
    assert "1 kept, others run again" in name(again)
    assert "1 kept, others copied to the host" in name(away)
    config = as_dict(away)["config"]
    assert isinstance(config, dict)
    assert config["pipeline.retention"] == "offload"


def test_peers_on_other_nodes_share_a_buffer() -> None:
    config = with_keys(Config(), {"mesh.dp_shard": 16, "mesh.ep": 16})
    assert [held(config, 0, node_size=n).peers for n in (8, 16, 1)] == [8, 15, 1]
    assert held(Config(), 0, node_size=8) == Held(0, 0)


@pytest.mark.parametrize("name", KINDS)
def test_few_microbatches_have_no_more_under_way_than_many(name: str) -> None:
    only = KINDS[name].stages_per_rank
    for pp, per_rank in itertools.product((1, 2, 4), (only,) if only else (1, 2, 3)):
        few = most_at_once(KINDS[name].build(pp, 2 * pp, per_rank))
        for number in range(2 * pp, 25):
            full = most_at_once(KINDS[name].build(pp, number, per_rank))
            assert all(map(int.__le__, few, full))


def most_at_once(schedule: Schedule) -> list[int]:
    return [max(map(sum, rank)) for rank in Precedence(schedule).peaks]


def test_what_is_cast_is_held_narrow_alone_where_it_is_gathered() -> None:
    keys = {"train.dtype": "bfloat16", "model.num_experts": 0, "model.num_layers": 8}
    config = with_keys(Config(), keys)
    layers = [
        stage(config, VOCAB, layers=range(i, i + 1), first=False, last=False) for i in range(8)
    ]
    each = layers[0].cast_bytes(size=2)
    whole, sharded = StageLayout(), StageLayout(dp_shard=2)
    casts = [
        buffer_bytes(config, layers, layout, active_stages=3)
        - buffer_bytes(
            with_keys(config, {"train.dtype": "float32"}), layers, layout, active_stages=3
        )
        for layout in (whole, sharded)
    ]
    # Of whole stages casts are held besides; of sharded ones half of what fp32 holds.
    assert casts == [8 * each, -3 * each]


def test_bytes_of_a_gather_are_half_of_those_of_a_reduction() -> None:
    config = config_of({"model.num_experts": 0, "train.dtype": "bfloat16"})
    work, layout = whole_model(config, VOCAB), StageLayout(dp_shard=2)
    gathered, reduced = (
        shard_transfer(config, work, layout, H100, what=what).bytes
        for what in ("gathered", "reduced")
    )
    sizes = {weight.size: weight.is_cast for weight in work.weights}
    assert {is_cast for size, is_cast in sizes.items() if size <= config.model.dim} == {False}
    norms = sum(weight.size for weight in work.weights if not weight.is_cast)
    # Each of two ranks gets half of all; norms travel as they are.
    assert gathered == reduced / 2 + norms / 2 * 2
    assert norms < 0.01 * reduced


def sharded(**keys: object) -> Config:
    mesh = {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.dp_shard": 2, "mesh.ep": 1}
    pipeline = {"pipeline.schedule": "1f1b", "pipeline.stages_per_rank": 1}
    batch = {"train.global_batch_size": 8, "train.microbatch_size": 1, "mesh.gather": "auto"}
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return config_of({**mesh, **pipeline, **batch, "model.num_layers": 12, **given})


def test_gradients_that_are_reduced_once_are_whole_until_then() -> None:
    each, once = (
        estimate(sharded(mesh__gather="block", mesh__reduce_once=how), H100, vocab_size=VOCAB)
        for how in (False, True)
    )
    elements = sum(w.size for w in whole_model(sharded(), VOCAB).weights)
    assert once.memory.buffers - each.memory.buffers == 4 * elements
    sent = [{t.purpose: t.bytes for t in e.transfers}["parameters"] for e in (each, once)]
    # Four microbatches: eight gathers, and four reductions or one.
    assert sent[0] / sent[1] == pytest.approx(12 / 9)
    # Of one microbatch they come as its activations go.
    one = {"train__global_batch_size": 2, "mesh__gather": "stage"}
    alone = estimate(sharded(**one), H100, vocab_size=VOCAB).memory
    kept = min(alone.activations, 4 * elements)
    several = estimate(sharded(mesh__gather="stage"), H100, vocab_size=VOCAB).memory
    assert several.buffers - alone.buffers == kept


def test_experts_cut_by_width_send_each_row_to_the_other_parts() -> None:
    config = config_of()
    row = 2 * config.model.dim * BYTES[config.train.dtype]
    exchanges = partial(expert_exchanges, config, node_size=8)
    whole, halves = (exchanges(StageLayout(dp_shard=4, etp=n)).bytes for n in (1, 2))
    assert whole == 0
    assert halves == row  # every token once, since some expert of every rank wants it
    both, dealt = (exchanges(StageLayout(dp_shard=4, ep=2, etp=n)).bytes for n in (2, 1))
    assert dealt < both <= dealt + 2 * row


def test_a_layer_that_runs_again_keeps_a_slice_of_its_input_and_exchanges_once_more() -> None:
    plans = {
        recompute: planned(
            config_of({"mesh.tp": 2, "train.recompute": recompute}),
            H100,
            vocab_size=VOCAB,
        )
        for recompute in ("none", "full")
    }
    model, tokens = plans["full"].config.model, plans["full"].config.microbatch_tokens
    size = BYTES[plans["full"].config.train.dtype]
    first = stage(plans["full"].config, VOCAB, layers=range(1), first=False, last=False)
    assert first.kept_bytes(tokens, tp=2) == model.dim * size * tokens / 2
    plain, again = (plan.prices[0] for plan in (plans["none"], plans["full"]))
    # Forward is half, and embedding and head stay.
    assert 1.3 * plain.exchanges < again.exchanges < 1.5 * plain.exchanges
    assert plain.forward == again.forward
    assert plain.input_grad < again.input_grad


def test_what_a_stage_waits_for_is_part_of_its_forward_or_its_backward() -> None:
    only_links = H100.with_values(flops=1e30, launch_seconds=0.0)
    for recompute in ("none", "feed_forward", "full"):
        config = config_of({"mesh.tp": 2, "mesh.cp": 2, "train.recompute": recompute})
        plan = planned(config, only_links, vocab_size=VOCAB)
        price = plan.prices[0]
        assert price.exchanges > 0
        assert price.forward + price.input_grad == pytest.approx(price.exchanges)


def test_tensor_parallel_ranks_share_out_the_heads_that_context_parallel_ranks_exchange() -> None:
    config = config_of()
    works = [stage(config, VOCAB, layers=range(1), first=False, last=False)]
    alone, shared = (
        {
            transfer.purpose: transfer.bytes
            for transfer in activation_transfers(
                config, works, StageLayout(cp=2, tp=tp), H100, tokens=64, backward=True
            )
        }
        for tp in (1, 2)
    )
    assert alone["context"] == 2 * shared["context"] > 0


def test_shared_cores_make_ranks_slower() -> None:
    config = config_of()
    alone = estimate(config, H100, vocab_size=VOCAB)
    halved = estimate(config, H100.with_values(cores=2), vocab_size=VOCAB)
    quarter = estimate(config, H100.with_values(cores=1), vocab_size=VOCAB)
    assert alone.seconds < halved.seconds < quarter.seconds
    assert quarter.seconds >= 4 * alone.parts["compute"]


def test_a_kernel_takes_as_long_as_its_products_or_its_bytes_and_all_as_long_as_the_host() -> None:
    machine = H100.with_values(
        flops=1e3, grouped_flops=5e2, memory_bandwidth=1e2, launch_seconds=1e-3, compiled=0.25
    )
    product = Kernel(kind="product", launches=1, flops=10, bytes=0.5, fixed_bytes=20)
    grouped = replace(product, kind="grouped", is_expert=True)
    moving = Kernel(launches=400, bytes=2)
    place = StageLayout(dp_shard=4, ep=4)

    def seconds(
        *kernels: Kernel, tokens: int, is_compiled: bool = False, load: float = 1, padded: float = 1
    ) -> float:
        way = Kernels(Counter(kernels), Counter(), Counter())
        rates = Rates(machine, is_compiled=is_compiled, slowed=1)
        return rates.compute(way, tokens, place, routed=Routed(load, padded)).forward

    assert seconds(product, tokens=100) == pytest.approx(1.0)
    assert seconds(product, tokens=1) == pytest.approx(0.205)  # the weight is read all the same
    assert seconds(grouped, tokens=100) == pytest.approx(2.0)
    assert seconds(grouped, tokens=1) == pytest.approx(0.055)  # a quarter of the experts is here
    assert seconds(grouped, tokens=100, load=1.5) == pytest.approx(3.0)
    # What is padding is moved, and not multiplied.
    assert seconds(grouped, tokens=100, padded=2) == pytest.approx(2.0)
    shown = replace(moving, is_expert=True)
    assert seconds(shown, tokens=100, load=1.5, padded=2) == pytest.approx(4.0)
    assert seconds(moving, tokens=100) == pytest.approx(2.0)
    assert seconds(moving, tokens=10) == pytest.approx(0.4)  # until the host has launched them
    assert seconds(moving, tokens=100, is_compiled=True) == pytest.approx(0.5)
    assert seconds(product, product, tokens=100) == pytest.approx(2.0)


def test_rows_leave_a_node_once_for_each_rank_or_once_for_each_node() -> None:
    config = config_of({"model.num_experts": 64, "model.top_k": 4, "model.num_shared_experts": 0})
    row = 2 * config.model.dim * BYTES[config.train.dtype]
    layout = StageLayout(dp_shard=32, ep=32)
    exchanges = partial(expert_exchanges, config, layout, node_size=8)
    by_rank, by_node = (exchanges(spread=Spread(ranks=4, nodes=nodes)) for nodes in (0, 2))
    assert by_rank.between == pytest.approx(4 * 24 / 32 * row, rel=0.02)  # and routing weights
    assert by_rank.inside == pytest.approx(4 * 7 / 32 * row, rel=0.02)
    assert by_node.between == pytest.approx(2 * 24 / 32 * row, rel=0.02)
    assert by_node.inside == pytest.approx(4 * 7 / 8 * row, rel=0.02)
    cut = StageLayout(dp_shard=32, etp=16)
    assert expert_exchanges(config, cut, node_size=16).between == 0
    assert expert_exchanges(config, cut, node_size=8).inside == 0
    near = expert_exchanges(config, layout, node_size=32)
    assert near.between == 0
    assert near.bytes == pytest.approx(exchanges().bytes)


def test_buffers_of_a_fixed_size_are_sent_and_kept_whole() -> None:
    # 4 tokens of 4 choose 2 of 8 experts on 4 ranks: 2 rows a pair, 3 in a buffer of 1.5 times.
    keys = {"model.num_experts": 8, "model.top_k": 2, "model.num_shared_experts": 0}
    keys |= {"train.microbatch_size": 1, "mesh.dp_replicate": 4, "mesh.ep": 4, "mesh.pp": 1}
    config = config_of({**keys, "pipeline.stages_per_rank": 1, "data.seq_len": 4})
    bounded, roomy, most = (with_keys(config, {"mesh.ep_buffer": n}) for n in (1.0, 1.5, 64.0))
    place = Layout.of(config.mesh).stages[0]
    assert [padding(each, place) for each in (config, bounded, roomy, most)] == [1, 1, 1.5, 4]
    assert padding(roomy, StageLayout(dp_shard=4)) == 1
    model, size = config.model, BYTES[config.train.dtype]
    exchanges = partial(expert_exchanges, layout=place, node_size=2)
    row, weight = model.dim * size, 4  # rows go there and back, weights there, three of four away
    sent = 3 / 4 * (2 * row + weight) * model.top_k
    for each, times in ((bounded, 1), (roomy, 1.5), (most, 4)):
        for spread in (Spread(), Spread(ranks=1, nodes=1, loads=((4, 3.0),))):
            assert exchanges(each, spread=spread).bytes == pytest.approx(times * sent)
    works = [stage(config, VOCAB, layers=range(1), first=False, last=False)]
    transfer = partial(expert_transfer, layout=place, machine=H100, tokens=4, backward=False)
    skewed = Spread(loads=((4, 3.0),))
    assert transfer(roomy, works, spread=skewed).bytes == pytest.approx(4 * 1.5 * sent)
    # Of a token two halves of the hidden rows are kept, of each of its experts.
    hidden = 2 * model.top_k * model.expert_hidden * size
    assert works[0].routed == hidden
    kept = [planned(each, H100, vocab_size=VOCAB).prices[0].kept for each in (bounded, roomy)]
    layers = model.num_layers - model.num_dense_layers
    assert kept[1] - kept[0] == pytest.approx(0.5 * 4 * hidden * layers)
    again = [
        buffer_bytes(with_keys(each, {"train.recompute": "full"}), works, place, active_stages=3)
        for each in (bounded, roomy)
    ]
    assert again[1] - again[0] == pytest.approx(0.5 * 4 * hidden)


def test_weight_gradients_that_are_put_off_take_the_time_of_layers_once_more() -> None:
    keys = {"mesh.pp": 2, "mesh.dp_replicate": 1, "mesh.ep": 1, "pipeline.stages_per_rank": 1}
    slow = MACHINES["cpu"].with_values(layer_seconds=1.0)
    whole, split = (
        Plan(
            with_keys(config_of(keys), {"pipeline.schedule": name, "mesh.gather": "stage"}),
            slow,
            vocab_size=VOCAB,
        ).prices
        for name in ("1f1b", "zero_bubble")
    )
    layers = config_of(keys).model.num_layers
    assert sum(price.full for price in split) - sum(price.full for price in whole) == layers
