"""Mutants of folders of models are read as transformers reads them, or refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hp_base.errors import ConfigError
from hp_checkpoint import Part
from hp_trainer.config import ModelConfig

transformers = pytest.importorskip("transformers", reason="of `nox -s models-sample`")

from hp_transformers.stages.export import write_folder  # noqa: E402 - needs transformers
from hp_transformers.stages.load import left_out, load_folder  # noqa: E402
from integration_tests.reliability.folder_changes import (  # noqa: E402
    CHANGES,
    INDEX,
    SINGLE,
    Good,
    write,
    write_index,
    write_shards,
)
from integration_tests.reliability.folders import draw, failures_of, make, meet_all  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]

# Each was read otherwise, or ended in a traceback.
KNOWN = [
    ("llama", "tied", "0.0"),
    ("llama", "doubled", "0.0"),
    ("transformers: gpt2", "doubled", "0.0"),
    ("transformers: gpt2", "stale", "0.0"),
    ("transformers: mixtral", "missing", "0.0"),
    ("transformers: mixtral", "shapes", "0.0"),
]
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def test_mutants_are_read_as_transformers_reads_them_or_refused(tmp_path: Path) -> None:
    drawn = [*KNOWN, *draw(6, 0)]
    met = meet_all(drawn, tmp_path / "results")
    assert failures_of(met) == []
    assert {m.verdict for m in met} >= {"equal", "refused"}
    # It goes on where it was stopped.
    assert meet_all(drawn, tmp_path / "results") == met
    assert len((tmp_path / "results").read_text().splitlines()) == len({*drawn})


def test_every_kind_of_change_meets_every_model() -> None:
    drawn = draw(200, 0)
    assert {kind for _, kind, _ in drawn} == CHANGES.keys()
    assert len({(name, kind) for name, kind, _ in drawn}) == 13 * len(CHANGES)


def _good(tmp_path: Path, name: str) -> tuple[Good, Path, ModelConfig]:
    """A good model, and an empty folder for another."""
    good = Good.of(make(f"transformers: {name}", tmp_path / "good"))
    folder = tmp_path / "model"
    folder.mkdir()
    return good, folder, ModelConfig(transformers=str(folder))


def _load(model: ModelConfig, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    parts = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    load_folder(model, {name: Part.of(tensor) for name, tensor in parts.items()})
    return parts


def test_an_index_may_list_both_names_of_a_tied_matrix(tmp_path: Path) -> None:
    good, folder, model = _good(tmp_path, "gemma3_text")
    listed = write_shards(folder, good.config, good.tensors)
    embedding, head = good.ends
    assert good.config.get("tie_word_embeddings", True)
    assert head not in listed
    write_index(folder, {**listed, head: listed[embedding]})
    found = _load(model, {name: tensor.shape for name, tensor in good.tensors.items()})
    assert all(torch.equal(found[name], tensor) for name, tensor in good.tensors.items())
    out = tmp_path / "out"
    boxes = {name: [Part.of(tensor).box] for name, tensor in found.items()}
    write_folder(out, boxes, lambda name, _: found[name], model, dtype=torch.float32)
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert index.keys() == good.tensors.keys()
    assert {n for file in out.glob("*.safetensors") for n in load_file(file)} == index.keys()
    _, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]


def test_frequencies_of_old_files_are_those_of_the_model(tmp_path: Path) -> None:
    good, folder, model = _good(tmp_path, "llama")
    right = 1e4 ** -(torch.arange(0, 4, 2) / 4)
    write(folder, good.config, {**good.tensors, FREQUENCIES: right})
    assert left_out(model) == []
    write(folder, good.config, {**good.tensors, FREQUENCIES: right * 0.5})
    with pytest.raises(ConfigError, match=rf"tensor {FREQUENCIES} must be what config.json says"):
        left_out(model)


def test_masks_of_old_files_are_those_that_the_model_makes(tmp_path: Path) -> None:
    good, folder, model = _good(tmp_path, "gpt_neox")
    name = "gpt_neox.layers.0.attention.bias"
    right = torch.ones(1, 1, 64, 64).tril().bool()
    hidden = {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
    write(folder, good.config, {**good.tensors, **hidden, name: right})
    assert left_out(model) == []
    write(folder, good.config, {**good.tensors, **hidden, name: torch.ones_like(right)})
    with pytest.raises(ConfigError, match=rf"tensor {name} must be what GPTNeoXForCausalLM makes"):
        left_out(model)


def test_weights_of_parts_that_transformers_has_not_are_told(tmp_path: Path) -> None:
    good, folder, model = _good(tmp_path, "deepseek_v3")
    name = "model.layers.61.eh_proj.weight"
    write(folder, good.config, good.tensors)
    save_file({**good.tensors, name: torch.ones(3)}, folder / SINGLE)
    assert left_out(model) == [name]
