"""In every layout, the loss that balances experts of transformers is that of one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hp_base.errors import ConfigError
from hp_trainer.config import ModelConfig
from hp_transformers.stages.balance import balance_of
from integration_tests.models.plain_transformers import make_folder, run_of, train_plainly
from integration_tests.models.test_transformers_models import require_equal
from integration_tests.runs import Result, train_in

pytest.importorskip("transformers", reason="of `nox -s transformers`")
pytestmark = pytest.mark.filterwarnings("default")  # of transformers

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "recompute": {"train__recompute": "full"},
    "fsdp 2": {"mesh__dp_shard": 2},
    "fsdp 2 by block recompute": {
        "mesh__dp_shard": 2,
        "mesh__gather": "block",
        "train__recompute": "full",
    },
    "hsdp": {"mesh__dp_shard": 2, "mesh__dp_replicate": 2},
    "pp 2": {"mesh__pp": 2, "pipeline__schedule": "1f1b"},
    "pp 2 interleaved": {"mesh__pp": 2, "pipeline__stages_per_rank": 2},
    "pp 2 zero bubble": {"mesh__pp": 2, "pipeline__schedule": "zero_bubble"},
    "pp 4": {"mesh__pp": 4, "pipeline__schedule": "gpipe"},
    "pp 2 fsdp 2 recompute": {"mesh__pp": 2, "mesh__dp_shard": 2, "train__recompute": "full"},
    "tp 2": {"mesh__tp": 2},
    "tp 2 ep 2": {"mesh__tp": 2, "mesh__ep": 2},
    "ep 2": {"mesh__dp_shard": 2, "mesh__ep": 2},
    "pp 2 ep 2": {"mesh__pp": 2, "mesh__dp_shard": 2, "mesh__ep": 2, "train__recompute": "full"},
    "cp 2 heads": {"mesh__cp": 2},
    "cp 2 ring": {"mesh__cp": 2, "mesh__cp_ring": True},
    "pp 2 cp 2": {"mesh__pp": 2, "mesh__cp": 2},
}
_SAMPLE = ("pp 2 ep 2", "pp 2 cp 2", "tp 2", "fsdp 2 by block recompute")
_FIELDS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


@cache
def _plainly(base: Path, **keys: Any) -> tuple[Path, Result]:
    text = "-".join(map(str, keys.values()))
    folder = make_folder("qwen3_moe", base / f"model-{text}", **_FIELDS)
    return folder, train_plainly(run_of(folder, **keys), base / f"plain-{text}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.sample(*_SAMPLE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_balance_is_that_of_one_process(layout: str, base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly(base)
    found = train_in(run_of(folder, **LAYOUTS[layout]), tmp_path)
    require_equal(found, expected)
    assert found.balances == pytest.approx(expected.balances, rel=1e-12)
    assert min(found.balances) > 0.3  # all layers alike would be 0.3 times two of a token


def test_what_is_balanced_is_a_microbatch(base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly(base)
    config = run_of(folder, train__microbatch_size=4, mesh__pp=2)
    found = train_in(config, tmp_path / "run")
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-12)
    assert abs(found.balances[0] - expected.balances[0]) > 1e-4
    alike = train_plainly(config, tmp_path / "plain")
    require_equal(found, alike)
    assert found.balances == pytest.approx(alike.balances, rel=1e-12)


@pytest.mark.parametrize("layout", ["fsdp 2", "pp 2"])
def test_documents_of_a_microbatch_are_balanced_together(
    layout: str, base: Path, tmp_path: Path
) -> None:
    folder, _ = _plainly(base)
    config = run_of(folder, data__documents="separate", **LAYOUTS[layout])
    expected = train_plainly(config, tmp_path / "plain")
    found = train_in(config, tmp_path / "run")
    require_equal(found, expected)
    assert found.balances == pytest.approx(expected.balances, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("dbrx", {}, "does not run without memory"),
        ("doge", {"is_moe": True, "num_experts": 16}, "does not get logits .tokens, experts."),
    ],
)
def test_a_loss_that_is_another_one_is_refused(
    name: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    from integration_tests.models.architectures.tiny import Tiny  # noqa: PLC0415 - needs transformers

    config = Tiny(name).config
    config.update({"output_router_logits": True, **fields})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"output_router_logits \(true\) of .* since .*{why}"):
        balance_of(ModelConfig(transformers=str(tmp_path)))


def test_a_model_without_such_a_loss_has_none(tmp_path: Path) -> None:
    from integration_tests.models.architectures.tiny import Tiny  # noqa: PLC0415 - needs transformers

    config = Tiny("deepseek_v3").config
    config.output_router_logits = True
    config.save_pretrained(tmp_path)
    assert balance_of(ModelConfig(transformers=str(tmp_path))) is None


@pytest.mark.parametrize("layout", ["pp 2", "ep 2"])
def test_counts_travel_exactly_in_bfloat16(layout: str, base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly(base)
    found = train_in(run_of(folder, train__dtype="bfloat16", **LAYOUTS[layout]), tmp_path)
    assert found.balances == pytest.approx(expected.balances, rel=1e-2)
