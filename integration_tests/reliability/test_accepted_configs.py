"""A small part of `nox -s rules`: what rules accept starts, and every key and rule is drawn."""

from pathlib import Path

import pytest

from hp_platform.testing import compare
from hp_trainer.config import rules
from hp_trainer.config.schema import fields
from integration_tests.reliability import accepted, drawn
from integration_tests.reliability.rule_names import broken_rules, every_rule
from integration_tests.reliability.started import start_all
from integration_tests.runs import config_of, train_in, write_corpus

EXACT = {"steps": 2, "dtype": "float64", "global_batch_size": 2, "microbatch_size": 1}


def test_every_key_is_drawn_or_said_not_to_be() -> None:
    assert not drawn.DOMAINS.keys() & drawn.NOT_DRAWN.keys()
    assert {*drawn.DOMAINS, *drawn.NOT_DRAWN} == set(fields())


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len(set(every_rule())) == len(every_rule()) > 80
    assert {*accepted.POLICY, *accepted.NO_EDGE} <= set(every_rule())


def test_a_config_at_an_edge_breaks_one_rule_when_it_goes_a_step_further() -> None:
    found = list(drawn.draw(8, seed="edges", largest=2))
    for each in found:
        rules.check(each.config)
        assert each.config.world_size <= 2
        assert each.edge is None or broken_rules(drawn.neighbour(each))[0] == each.edge.rule
        assert drawn.config_of(drawn.keys_that_differ(each.config)) == each.config
    assert sum(each.edge is not None for each in found) == 6


def test_drawn_configs_start(tmp_path: Path) -> None:
    configs = [each.config for each in drawn.draw(8, seed="sample", largest=2)]
    configs = [each for each in configs if each.world_size == 2 and each.train.compile == "none"]
    assert len(configs) >= 3
    found = list(start_all(configs[:3], tmp_path, data=write_corpus(tmp_path)))
    assert [each.problem for each in found] == [""] * 3
    assert all(len(each.numbers) == 1 for each in found)


def test_what_fails_between_others_is_told_and_ends_none_of_them(tmp_path: Path) -> None:
    good = drawn.config_of({"mesh.dp_replicate": 2})
    bad = drawn.config_of({"mesh.dp_replicate": 2, "model.top_k": 5})
    assert broken_rules(bad)
    first, second, third = start_all([good, bad, good], tmp_path, data=write_corpus(tmp_path))
    assert "top_k (5) must be in [1, num_experts (4)]" in second.problem
    assert first.numbers == third.numbers
    assert first.problem == third.problem == ""


@pytest.mark.sample("ring")
@pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])
def test_sequences_that_have_no_two_halves_for_each_rank_are_dealt_out(
    tmp_path: Path, ring: bool
) -> None:
    """Ten tokens of two ranks are five each, and were to be two halves of each."""
    data = {"seq_len": 10}
    mesh = {"cp": 2, "cp_heads": 1, "cp_deal": True, "cp_ring": ring}
    dealt = train_in(config_of(mesh=mesh, data=data, train=EXACT), tmp_path / "dealt")
    alone = train_in(config_of(data=data, train=EXACT), tmp_path / "alone")
    comparison = compare(dealt.first_gradients, alone.first_gradients, bound=1e-12)
    assert comparison.ok, comparison
    assert dealt.eval_loss == pytest.approx(alone.eval_loss, rel=1e-9)


@pytest.mark.sample("0")
@pytest.mark.parametrize("experts", [0, 4])
def test_tensor_parallel_ranks_may_have_unequal_parts_of_a_dense_layer(
    tmp_path: Path, experts: int
) -> None:
    model = {"num_experts": experts, "num_dense_layers": 2, "dense_hidden": 5, "num_layers": 2}
    cut, alone = (config_of(mesh={"tp": tp}, model=model, train=EXACT) for tp in (2, 1))
    rules.check(cut)
    found, expected = train_in(cut, tmp_path / "cut"), train_in(alone, tmp_path / "alone")
    comparison = compare(found.first_gradients, expected.first_gradients, bound=1e-12)
    assert comparison.ok, comparison


def test_what_no_layer_has_need_not_be_divided() -> None:
    rules.check(config_of(mesh={"tp": 2, "etp": 2}, model={"num_experts": 0, "expert_hidden": 5}))


def test_a_sample_may_begin_as_a_document_does(tmp_path: Path) -> None:
    asked = {"train.sample_tokens": 2, "train.sample_prompt": ""}
    config = drawn.config_of(asked)
    rules.check(config)
    [found] = start_all([config], tmp_path, data=write_corpus(tmp_path))
    assert found.problem == ""
