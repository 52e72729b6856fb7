"""What hp verify compares with what, how close it must be, and how small it makes a config."""

import itertools
import math
import os

import pytest

from hp_base.errors import ConfigError
from hp_plan.costs.modules import whole_model
from hp_plan.layouts.space import sample_layouts
from hp_train.cli import main
from hp_train.verify.pairs import (
    described,
    differing_keys,
    families,
    must_be_exact,
    require_comparable,
)
from hp_train.verify.shrinking import shrink
from hp_trainer.config import Config, rules, to_dict
from hp_trainer.config.options import checked_config, one_process, resolve, shipped, with_keys


def config_of(**keys: object) -> Config:
    given = [(key.replace("__", "."), value) for key, value in keys.items()]
    return resolve("quickstart", given, env={}).config


def test_one_process_is_the_same_training_without_a_layout() -> None:
    config = config_of()
    alone = one_process(config)
    assert alone.world_size == 1
    assert {key.partition(".")[0] for key in differing_keys(config, alone)} <= {"mesh", "pipeline"}
    rules.check(alone)


def test_a_check_computes_in_fp64_with_one_thread() -> None:
    config = checked_config(config_of(train__dtype="bfloat16"), dtype="float64")
    assert config.train.dtype == "float64"
    assert config.launch.threads_per_process == 1


def test_layouts_of_another_model_are_not_compared() -> None:
    message = r"model.dim \(128\) must equal model.dim \(64\) of the other config"
    with pytest.raises(ConfigError, match=message):
        require_comparable(config_of(), config_of(model__dim=64))
    require_comparable(config_of(), config_of(mesh__pp=1, train__microbatch_size=2))
    require_comparable(config_of(), config_of(train__log_every=1, launch__hang_seconds=9))


@pytest.mark.parametrize(
    ("keys", "exact"),
    [
        ({"pipeline__schedule": "looped_bfs"}, True),
        ({"train__log_every": 3}, True),
        ({"train__recompute": "full"}, True),
        ({"train__microbatch_size": 2}, False),
        ({"mesh__ep": 1}, False),
        ({"pipeline__schedule": "1f1b", "pipeline__stages_per_rank": 1}, False),
    ],
)
def test_bits_must_stay_where_only_the_order_of_steps_differs(
    keys: dict[str, object], exact: bool
) -> None:
    assert must_be_exact(config_of(), config_of(**keys)) is exact


def test_bits_may_differ_where_a_schedule_brings_layers_to_other_numbers_of_ranks() -> None:
    def of(schedule: str, **keys: object) -> Config:
        return config_of(mesh__ep=1, pipeline__schedule=schedule, **keys)

    uneven = {"mesh__stage_tp": (1, 2)}
    assert must_be_exact(of("interleaved_1f1b"), of("zbv"))
    assert not must_be_exact(of("interleaved_1f1b", **uneven), of("zbv", **uneven))
    assert must_be_exact(of("interleaved_1f1b", **uneven), of("looped_bfs", **uneven))
    # With one stage more, losses of layers are added up in another order.
    one = {"pipeline__stages_per_rank": 1}
    assert must_be_exact(of("gpipe", **one), of("1f1b", **one))
    assert not must_be_exact(of("u_shape", **one), of("1f1b", **one))


def test_a_layout_is_described_by_overrides_that_make_it() -> None:
    config = config_of(train__microbatch_size=2)
    text = described(config, config_of())
    assert text == (
        "mesh.pp=2 mesh.dp_replicate=2 mesh.ep=2 pipeline.schedule=interleaved_1f1b "
        "pipeline.stages_per_rank=2 train.microbatch_size=2"
    )
    assert described(one_process(config), config) == "one process"
    uneven = config_of(mesh__ep=1, mesh__stage_tp=(1, 2))
    assert " mesh.stage_tp=[1,2] " in described(uneven, uneven)


def test_a_shrunk_config_keeps_what_divides_what() -> None:
    config = config_of(
        model__dim=4096,
        model__num_heads=64,
        model__num_kv_heads=8,
        model__num_layers=30,
        model__expert_hidden=1536,
        model__num_experts=128,
        model__top_k=8,
        data__seq_len=4096,
        train__global_batch_size=1024,
    )
    [small] = shrink([config])
    rules.check(small)
    model = small.model
    assert (model.dim, model.num_heads, model.num_kv_heads) == (32, 4, 2)
    assert model.num_experts % small.mesh.ep == 0
    assert model.num_experts > model.top_k > 1
    assert model.num_layers % 4 == config.model.num_layers % 4
    assert small.data.seq_len == 16
    assert small.mesh == config.mesh
    assert small.pipeline == config.pipeline


def test_a_shrunk_config_keeps_what_does_not_divide() -> None:
    config = config_of(
        mesh__pp=2,
        mesh__cp=2,
        mesh__tp=2,
        mesh__cp_deal=True,
        mesh__cp_heads=1,
        mesh__ep=1,
        pipeline__schedule="1f1b",
        pipeline__stages_per_rank=1,
        model__attention="mla",
        model__qk_norm=False,
        model__num_heads=16,
        model__num_kv_heads=16,
        model__kv_lora_rank=511,
        model__num_layers=7,
        model__num_experts=0,
        model__dense_hidden=1025,
        data__seq_len=2052,
        train__global_batch_size=27,
        train__microbatch_size=1,
        mesh__dp_replicate=1,
    )
    rules.check(config)
    [small] = shrink([config])
    assert small.data.seq_len % 8 == 4  # halves of a rank, but not of its tensor-parallel ranks
    assert small.model.dense_hidden % 2 == 1
    assert small.model.kv_lora_rank % 2 == 1
    assert small.model.num_layers % 2 == 1
    assert small.train.global_batch_size % 2 == 1  # so are microbatches, for two ranks
    assert small.model.num_heads % 4 == 0
    assert math.prod((small.model.dim, small.data.seq_len)) <= 1024


@pytest.mark.parametrize("name", shipped())
def test_every_config_that_ships_can_be_shrunk(name: str) -> None:
    config = resolve(name, [("data.tokenizer", ""), ("data.paths", [])], env={}).config
    [small] = shrink([config])
    rules.check(small)
    work = whole_model(small, 256)
    assert sum(weight.size for weight in work.weights) < 2_000_000


def test_every_generated_layout_can_be_shrunk_together_with_another() -> None:
    base = with_keys(
        one_process(config_of()),
        {"model.num_layers": 8, "model.num_experts": 12, "train.global_batch_size": 12}
        | {"train.microbatch_size": 3},
    )
    most = 4 if os.environ.get("HP_WHOLE") == "1" else 3
    layouts = sample_layouts(base, 24, num_processes=range(2, most + 1)).layouts
    for one, other in itertools.pairwise(layouts):
        small = shrink([one, other])
        models = [to_dict(config)["model"] for config in small]
        assert models[0] == models[1]
        for config in small:
            rules.check(config)
            assert math.prod((config.model.dim, config.data.seq_len)) <= 8192


def test_families_are_what_must_be_bitwise_equal() -> None:
    base = resolve("quickstart", [("train.global_batch_size", 16)], env={}).config
    layouts = sample_layouts(base, 60, seed=0, num_processes=range(2, 3)).layouts
    turned = {"none": "full"}.get(layouts[0].train.recompute, "none")
    layouts = (*layouts, with_keys(layouts[0], {"train.recompute": turned}))
    found = families(layouts)
    assert sorted(map(id, itertools.chain(*found))) == sorted(map(id, layouts))
    assert 1 < max(map(len, found)) < 20
    for family, other in itertools.combinations(found, 2):
        assert not must_be_exact(family[0], other[0])
        assert all(must_be_exact(family[0], layout) for layout in family[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("verify --against model.dim=64", "must equal model.dim (64) of the other config"),
        (
            "verify --against mesh.pp=3,mesh.stage_tp=[1,2]",
            "mesh.stage_tp ([1, 2]) must have a size for each of mesh.pp (3) pipeline ranks",
        ),
        ("verify --against mesh.pp", 'config ("mesh.pp") must be a .toml file'),
        ("verify --steps 0", "--steps (0) must be at least 1"),
        (
            "verify --against mesh.ep=2",
            "--against mesh.ep=2 is the same training: there is nothing",
        ),
        ("verify debug-llama3 --pipeline.schedule 1f1b --job a:b", "there is nothing to compare"),
        ("verify --against oracle --job a:b", "oracle knows the models of hp-train, not --job a:b"),
        ("verify --against oracle --train.optimizer muon", 'knows no train.optimizer ("muon")'),
        ("verify --generate 3 --against quickstart", "no --against"),
        ("verify --generate 3 --processes 2-4", "--processes (2-4) must be like 2:8"),
        ("verify --generate 3 --part 4/3", "--part (4/3) must be like 1/3"),
        ("verify --generate 3 --part 0/3", "--part (0/3) must be like 1/3"),
        ("verify --generate 3 --part third", "--part (third) must be like 1/3"),
        ("verify --generate pair", "--generate (pair) must be a whole number"),
        ("verify --part 1/3", "--part (1/3) is of the layouts of --generate"),
        ("verify --generate 3 --processes 7:7", "no layout of 7 to 7 processes is allowed"),
        ("verify --train.stepz 3", "unknown key train.stepz"),
        ("verify --step 3", "--step is not a known option; did you mean --steps?"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
