"""Configs that have every pair of a feature of a model and a setting, of keys, bounds and rules."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_base.errors import ConfigError
from hp_train.verify.oracle import Oracle
from hp_train.verify.pairs import WITHOUT_EFFECT
from hp_trainer.config import Config, rules, to_dict
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.config.schema import fields
from hp_trainer.model import TransformerStage
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters
from integration_tests.layouts.pairs import covering
from integration_tests.layouts.pairs.__main__ import main
from integration_tests.layouts.pairs.covering import Design, Setting, changes, cover, values_of

ROOT = Path(__file__).parents[3]
MODEL = Path(__file__).with_name("model.toml")
SOME = [
    Setting("mesh.tp", 2),
    Setting("mesh.etp", 2),
    Setting("mesh.reduce_once", True),
    Setting("pipeline.overlap", True),
    Setting("pipeline.stages_per_rank", 3),
    Setting("train.weight_decay", 0.1),
]


@pytest.fixture(scope="module")
def base() -> Config:
    return resolve(str(MODEL), env={}).config


@pytest.fixture(scope="module")
def design(base: Config) -> Design:
    return cover(base, num_processes=4, settings=SOME)


def value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_every_key_of_a_config_is_paired_or_left_out_with_a_reason(base: Config) -> None:
    values, left_out = values_of(base, 4)
    whole = {key for key in left_out if "=" not in key}
    assert whole | values.keys() == fields().keys()
    assert not whole & values.keys()
    for key, settings in values.items():
        assert len(settings) > 1, key
        assert settings[0].value == value(base, key)
    # What trains in another way is no such key, whatever it is called.
    kept = ("model.", "mesh.", "pipeline.")
    files = {key for key, why in left_out.items() if why.startswith(covering.OF_FILES)}
    assert {key for key in whole if key.startswith(kept)} <= files
    assert not WITHOUT_EFFECT.count("model.")


def test_a_key_that_nothing_is_known_of_is_refused(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = covering._candidates
    monkeypatch.setattr(
        covering, "_candidates", lambda f, v: () if f.key == "model.norm_eps" else kept(f, v)
    )
    with pytest.raises(
        ConfigError, match=r"^model\.norm_eps must have a second value to be paired"
    ):
        cover(base, num_processes=4, settings=SOME)


def test_every_pair_is_in_a_config_that_the_rules_allow_or_a_rule_is_against_it(
    design: Design,
) -> None:
    features = {feature for feature, _ in design.pairs}
    assert {feature.key for feature in features} == {
        key for key in values_of(design.base, 4)[0] if key.startswith("model.")
    }
    assert len(design.pairs) == len(features) * len(SOME)
    for config in design.configs:
        rules.check(config)
        assert config.world_size <= 4
    for (feature, setting), where in design.pairs.items():
        if isinstance(where, int):
            found = design.configs[where]
            assert value(found, feature.key) == feature.value
            assert value(found, setting.key) == setting.value
    assert dict(design.refused) == {
        (Setting("model.num_layers", 4), SOME[4]): (
            "model.num_layers (4) must be at least mesh.pp (2) x pipeline.stages_per_rank (3) = 6"
        ),
        (Setting("model.num_experts", 0), SOME[1]): (
            "model.num_experts=0 does nothing beside mesh.etp=2, or it there"
        ),
        (Setting("model.num_experts", 0), SOME[3]): design.refused[
            Setting("model.num_experts", 0), SOME[3]
        ],
    }
    assert (
        "pipeline.overlap (true) must be false with"
        in design.refused[Setting("model.num_experts", 0), SOME[3]]
    )


def test_what_a_value_needs_to_do_anything_comes_along(design: Design) -> None:
    once = design.pairs[Setting("model.kv_lora_rank", 16), SOME[2]]
    assert isinstance(once, int)
    config = design.configs[once]
    assert (config.mesh.gather, config.model.attention) == ("block", "mla")
    assert config.mesh.dp_shard > 1
    lines = list(design.lines())
    assert len(lines) == len(design.pairs) + len(design.left_out)
    overrides = " ".join(map(str, changes(config, design.base)))
    assert f"model.kv_lora_rank=16\tmesh.reduce_once=true\t{overrides}" in lines
    assert "mesh.reduce_once=true" in overrides.split()


def test_the_same_arguments_give_the_same_configs(design: Design) -> None:
    again = cover(design.base, num_processes=4, settings=SOME)
    assert (again.configs, dict(again.pairs)) == (design.configs, dict(design.pairs))


@pytest.mark.sample  # whose design of all settings takes 10 s
def test_the_command_writes_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.txt"
    assert main([str(MODEL), "--processes", "2", "--list", str(file)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    refused = [what for *_, what in lines if what.startswith("refused: ")]
    left_out = [what for *_, what in lines if what.startswith("left out: ")]
    assert first.startswith(f"{len(lines) - len(left_out)} pairs of ")
    assert first.endswith(f", {len(refused)} refused")
    assert sum("refused: " in line for line in others) == len(set(refused))


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    model = config.model
    stage = TransformerStage(
        model, model.vocab_size or 258, layers=range(model.num_layers), first=True, last=True
    ).double()
    initialize_parameters(named_parameters(stage), model, seed=0)
    return {name: tensor.detach().clone() for name, tensor in stage.state_dict().items()}


def trained(config: Config) -> list[torch.Tensor]:
    """What plain torch computes in a step, and has after it."""
    weights = weights_of(config)
    begun = [tensor.clone() for tensor in weights.values()]
    oracle = Oracle(to_dict(config), weights, separator=257)
    tokens = torch.randint(250, (1, 17), generator=torch.Generator().manual_seed(1))
    outcome = oracle.train_step(tokens, 0, max_norm=1.0, skip=False)
    return [*begun, *outcome.gradients.values(), *oracle.weights.values()]


def test_every_feature_changes_what_is_trained(base: Config) -> None:
    """Where it is said to do so: a pair with one that does nothing would show nothing."""
    small = with_keys(base, {"train.global_batch_size": 1})
    [setting] = SOME[-1:]
    design = cover(small, num_processes=4, settings=[setting])
    known = {config: trained(config) for config in design.configs}
    for feature, _ in design.pairs:
        where = design.pairs[feature, setting]
        assert isinstance(where, int)
        usual = value(small, feature.key)
        if feature.value == usual or feature.key == "model.max_positions":  # which files have
            continue
        config, without = design.configs[where], {feature.key: usual}
        if feature == Setting("model.rope_scaling", "none"):  # beside which the factor must be 1
            without["model.rope_factor"] = small.model.rope_factor
        one, other = known[config], trained(with_keys(config, without))
        assert len(one) != len(other) or not all(map(torch.equal, one, other)), feature


def test_configs_are_found_without_torch() -> None:
    name = covering.__name__
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=False, timeout=60, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: CONFIG"),
        ("quickstart --processes 1", "--processes (1) must be at least 2"),
        ("quickstart --part 4/3", "--part (4/3) must be like 1/3"),
        ("quickstart --part third", "--part (third) must be like 1/3"),
        ("quickstart --train.stepz 3", "unknown key train.stepz"),
        ("quickstart --list no/where", "--list (no/where) must be a file that can be written"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == ConfigError.exit_code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
