"""The kit trains the same model in transformers; without it, it says so."""

import importlib.util
import json
from pathlib import Path

import pytest

from hp_trainer.config.options import resolve, to_toml
from integration_tests.acceptance.cases import Case, Place, slug
from integration_tests.acceptance.rivals import rival

PLACE = Place(device="cpu")


def _trained(work: Path, preset: str) -> str:
    """What a case that has trained a model leaves."""
    name = f"{preset} on 1"
    folder = work / "speed" / slug(name)
    folder.mkdir(parents=True)
    keys = {"train.global_batch_size": 2, "train.microbatch_size": 1}
    (folder / "config.toml").write_text(to_toml(resolve(preset, keys.items(), env={}).config))
    (folder / "figures.json").write_text(json.dumps({"tokens/s": 1000.0}))
    return name


@pytest.mark.parametrize("preset", ["debug-qwen3-moe", "debug-llama3"])
def test_a_model_of_the_kit_is_trained_in_transformers(preset: str, tmp_path: Path) -> None:
    keys = {"of": _trained(tmp_path, preset), "rival": "transformers"}
    case = Case(name="any", what="", work="rival", keys=keys, dtype="float32")
    found = rival(case, PLACE, tmp_path)
    if importlib.util.find_spec("transformers") is None:
        assert (found.status, found.summary) == ("left out", "transformers is not installed")
        return
    assert found.status == "passed", found.summary
    assert found.figures["tokens/s"] > 0
    # 260 rows of the two tables instead of 256, else as many numbers as the model of hp-train.
    assert found.figures["parameters"] > 1e5
