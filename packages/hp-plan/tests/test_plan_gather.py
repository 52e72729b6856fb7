"""`mesh.gather = "auto"`: by stage or by block, by memory and price."""

import pytest

from hp_plan import MACHINES, choose, estimate
from hp_plan.price.estimate import ROOM, Plan, decided, fits, most_memory
from hp_trainer.config import Config
from hp_trainer.config.options import resolve, with_keys

VOCAB = 256
H100, H200 = MACHINES["h100"], MACHINES["h200"]


def sharded(**keys: object) -> Config:
    mesh = {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.dp_shard": 2, "mesh.ep": 1}
    pipeline = {"pipeline.schedule": "1f1b", "pipeline.stages_per_rank": 1}
    batch = {"train.global_batch_size": 8, "train.microbatch_size": 1, "mesh.gather": "auto"}
    given = {key.replace("__", "."): value for key, value in keys.items()}
    keys = {**mesh, **pipeline, **batch, "model.num_layers": 12, **given}
    return resolve("quickstart", keys.items(), env={}).config


def test_of_what_fits_the_faster_is_taken_and_by_stage_if_none_is() -> None:
    config = sharded()
    by_stage, by_block = (with_keys(config, {"mesh.gather": how}) for how in ("stage", "block"))
    whole, parts = (
        most_memory(each, H100, vocab_size=VOCAB).total for each in (by_stage, by_block)
    )
    assert parts < whole
    # Every microbatch sends by block what is sent once by stage; over links that cost nothing both
    # take as long; and over those of an H100 a gather is hidden only by block.
    slow = H100.with_values(bandwidth=1e7)
    free = H100.with_values(bandwidth=1e30, latency=0.0)
    for machine, how in ((slow, "stage"), (free, "stage"), (H100, "block")):
        enough = machine.with_values(memory=(whole + 1) / (1 - ROOM))
        assert decided(config, enough, vocab_size=VOCAB).mesh.gather == how
        found = estimate(config, enough, vocab_size=VOCAB)
        assert found.config.mesh.gather == how
        seconds = [
            Plan(each, machine, vocab_size=VOCAB).estimate().seconds
            for each in (by_stage, by_block)
        ]
        assert found.seconds == min(seconds)
        assert (seconds[0] <= seconds[1]) is (how == "stage")
        for memory in (whole - 1, 1.0):
            tight = machine.with_values(memory=memory / (1 - ROOM))
            assert decided(config, tight, vocab_size=VOCAB).mesh.gather == "block"
            assert fits(by_block, parts, tight) is (memory > 1)


def test_by_stage_is_what_cannot_be_by_block() -> None:
    tight = H100.with_values(memory=1.0)
    split = sharded(mesh__pp=2, pipeline__schedule="zero_bubble")
    alone = sharded(mesh__dp_shard=1)
    given = sharded(mesh__gather="stage")
    for kept in (split, alone, given):
        assert decided(kept, tight, vocab_size=VOCAB).mesh.gather == "stage"
    with pytest.raises(ValueError, match=r"mesh\.gather \(auto\) must be decided"):
        Plan(sharded(), H100, vocab_size=VOCAB)


PUBLISHED: dict[str, tuple[str, dict[str, object], str, str]] = {
    # By block its experts travel between nodes for each of 80 microbatches, at 0.38 of the rate.
    "gpt-oss-120b, 64 GPUs, pp 4, ep 8": (
        "gpt-oss-120b",
        {"mesh.pp": 4, "mesh.dp_shard": 16, "mesh.ep": 8, "train.global_batch_size": 1280},
        "block",
        "stage",
    ),
    # One microbatch: what is gathered by stage is waited for.
    "Llama-3.1-8B, 8 GPUs": (
        "llama-3.1-8b",
        {
            "data.seq_len": 8192,
            "mesh.dp_shard": 8,
            "train.global_batch_size": 16,
            "train.microbatch_size": 2,
            "train.recompute": "full",
        },
        "block",
        "block",
    ),
}


@pytest.mark.sample("gpt-oss-120b, 64 GPUs, pp 4, ep 8")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_gather_as_memory_and_price_say(name: str) -> None:
    preset, keys, narrow, wide = PUBLISHED[name]
    config = resolve(preset, keys.items(), env={}).config
    assert config.mesh.gather == "auto"
    size = config.model.vocab_size
    by_stage, by_block = (with_keys(config, {"mesh.gather": how}) for how in ("stage", "block"))
    for machine, how in ((H100, narrow), (H200, wide)):
        found = decided(config, machine, vocab_size=size)
        assert found.mesh.gather == how
        whole = Plan(by_stage, machine, vocab_size=size).estimate()
        parts = Plan(by_block, machine, vocab_size=size).estimate()
        assert fits(by_block, parts.memory.total, machine)
        if fits(by_stage, whole.memory.total, machine):
            assert (whole.seconds <= parts.seconds) is (how == "stage")
        else:
            assert how == "block"


def test_the_search_takes_what_is_decided() -> None:
    config = sharded(train__global_batch_size=8)
    for bandwidth in (1e7, H100.bandwidth):
        machine = H100.with_values(bandwidth=bandwidth)
        for found in choose(config, 2, machine, vocab_size=VOCAB).best:
            left_open = with_keys(found.config, {"mesh.gather": "auto"})
            assert decided(left_open, machine, vocab_size=VOCAB) == found.config


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "v_min", "dualpipe_v"])
def test_what_decides_is_what_the_plan_says(schedule: str) -> None:
    stages = 2 if schedule in ("v_min", "dualpipe_v") else 1
    config = sharded(
        mesh__pp=2,
        mesh__gather="stage",
        pipeline__schedule=schedule,
        pipeline__stages_per_rank=stages,
    )
    memory = most_memory(config, H100, vocab_size=VOCAB)
    assert memory == estimate(config, H100, vocab_size=VOCAB).memory
