"""Models of transformers in hp-train's layouts compute what plain transformers does."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from integration_tests.models.plain_transformers import FIELDS, make_folder, run_of, train_plainly
from integration_tests.runs import Result, train_in

pytest.importorskip("transformers", reason="of `nox -s transformers`")
from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.filterwarnings("default")  # of transformers

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "fsdp 2": {"mesh__dp_shard": 2},
    "fsdp 2 by block": {"mesh__dp_shard": 2, "mesh__gather": "block"},
    "hsdp": {"mesh__dp_shard": 2, "mesh__dp_replicate": 2},
    "pp 2": {"mesh__pp": 2, "pipeline__schedule": "1f1b"},
    "pp 2 interleaved": {"mesh__pp": 2, "pipeline__stages_per_rank": 2},
    "pp 2 zero bubble": {"mesh__pp": 2, "pipeline__schedule": "zero_bubble"},
    "pp 2 fsdp 2": {"mesh__pp": 2, "mesh__dp_shard": 2, "pipeline__schedule": "1f1b"},
    "recompute": {"mesh__pp": 2, "train__recompute": "full"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep 2": {"mesh__dp_replicate": 2, "mesh__ep": 2},
    "fsdp 4 ep 2": {"mesh__dp_shard": 4, "mesh__ep": 2},
    "pp 2 ep 2": {"mesh__pp": 2, "mesh__dp_shard": 2, "mesh__ep": 2, "train__recompute": "full"},
    "tp 2 ep 2": {"mesh__tp": 2, "mesh__ep": 2, "train__recompute": "full"},
    "fsdp 2 tp 2 ep 2": {"mesh__dp_shard": 2, "mesh__tp": 2, "mesh__ep": 2},
    "ep 2 buffers": {"mesh__dp_shard": 2, "mesh__ep": 2, "mesh__ep_buffer": 1.0},
    "tp 2 ep 2 buffers": {"mesh__tp": 2, "mesh__ep": 2, "mesh__ep_buffer": 2.0},
    "pp 2 ep 2 overlap": {
        "mesh__pp": 2,
        "mesh__dp_shard": 2,
        "mesh__ep": 2,
        "pipeline__schedule": "dualpipe_v",
        "pipeline__stages_per_rank": 2,
        "pipeline__overlap": True,
        "train__microbatch_size": 1,
    },
    "pp 2 tp 2 ep 2 overlap": {
        "mesh__pp": 2,
        "mesh__tp": 2,
        "mesh__ep": 2,
        "pipeline__schedule": "dualpipe_v",
        "pipeline__stages_per_rank": 2,
        "pipeline__overlap": True,
        "train__microbatch_size": 1,
    },
    "pp 2 cp 2 ep 2 overlap": {
        "mesh__pp": 2,
        "mesh__cp": 2,
        "mesh__ep": 2,
        "pipeline__schedule": "dualpipe_v",
        "pipeline__stages_per_rank": 2,
        "pipeline__overlap": True,
        "train__microbatch_size": 1,
    },
    "hsdp 2 tp 2 ep 4": {"mesh__dp_replicate": 2, "mesh__tp": 2, "mesh__ep": 4},
}
SEQUENCES: dict[str, dict[str, Any]] = {
    "cp 2 heads": {"mesh__cp": 2},
    "cp 2 gather": {"mesh__cp": 2, "mesh__cp_heads": 1},
    "cp 2 ring": {"mesh__cp": 2, "mesh__cp_ring": True},
    "pp 2 cp 2": {"mesh__pp": 2, "mesh__cp": 2, "pipeline__stages_per_rank": 2},
    "cp 2 ep 2 recompute": {"mesh__cp": 2, "mesh__ep": 2, "train__recompute": "full"},
}
MATRICES: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh__tp": 2},
    "pp 2 tp 2": {"mesh__pp": 2, "mesh__tp": 2, "train__recompute": "full"},
    "fsdp 2 tp 2": {"mesh__dp_shard": 2, "mesh__tp": 2},
    "cp 2 tp 2": {"mesh__cp": 2, "mesh__tp": 2, "mesh__cp_heads": 1},
}
_SAMPLE = [
    *("llama-fsdp 2 by block", "llama-pp 2 zero bubble", "qwen3_moe-hsdp", "gemma2-recompute"),
    *("gpt2-pp 2 fsdp 2", "qwen3_next-pp 2 interleaved"),
]


@cache
def _plainly(name: str, base: Path) -> tuple[Path, Result]:
    folder = make_folder(name, base / name)
    return folder, train_plainly(run_of(folder), base / f"{name}-plain")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are."""
    return tmp_path_factory.mktemp("models")


def require_equal(found: Result, expected: Result, bound: float = 1e-12) -> None:
    """Compare all that two runs have computed; what is zero in both has no relative error."""
    assert found.parameters.keys() == expected.parameters.keys()
    for kind in ("first_gradients", "parameters", "moments"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        for name, tensor in theirs.items():
            error = (ours[name] - tensor).norm() / tensor.norm().clamp(min=1e-30)
            assert error <= bound, f"{kind} {name}: {error:.1e}"
    for ours, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert ours == pytest.approx(theirs, rel=bound)


@pytest.mark.sample(*_SAMPLE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FIELDS)
def test_every_layout_computes_what_plain_transformers_does(
    name: str, layout: str, base: Path, tmp_path: Path
) -> None:
    folder, expected = _plainly(name, base)
    found = train_in(run_of(folder, **LAYOUTS[layout]), tmp_path)
    require_equal(found, expected)


@pytest.mark.sample("qwen3_moe-fsdp 2 tp 2 ep 2", "qwen3_next-pp 2 ep 2")
@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_ranks_share_experts(name: str, layout: str, base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly(name, base)
    require_equal(train_in(run_of(folder, **EXPERTS[layout]), tmp_path), expected)


@pytest.mark.sample("ep 2", "tp 2 ep 2")
@pytest.mark.parametrize("layout", EXPERTS)
def test_shared_experts_compute_in_bfloat16(layout: str, base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly("qwen3_moe", base)
    found = train_in(run_of(folder, train__dtype="bfloat16", **EXPERTS[layout]), tmp_path)
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)
    assert found.norms == pytest.approx(expected.norms, rel=5e-2)
    for name, gradient in expected.first_gradients.items():
        error = (found.first_gradients[name] - gradient).norm() / gradient.norm()
        assert error <= (0.2 if "experts" in name else 0.1), f"{name}: {error:.1e}"


@pytest.mark.sample("gemma2-cp 2 gather", "llama-pp 2 cp 2", "qwen3_moe-cp 2 ep 2 recompute")
@pytest.mark.parametrize("layout", SEQUENCES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gpt2"])
def test_ranks_share_sequences(name: str, layout: str, base: Path, tmp_path: Path) -> None:
    if "ep" in layout and name != "qwen3_moe":
        pytest.skip("of experts")
    folder, expected = _plainly(name, base)
    require_equal(train_in(run_of(folder, **SEQUENCES[layout]), tmp_path), expected)


@pytest.mark.sample("llama-pp 2 tp 2", "qwen3_moe-fsdp 2 tp 2", "gemma2-tp 2")
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_ranks_share_matrices(name: str, layout: str, base: Path, tmp_path: Path) -> None:
    folder, expected = _plainly(name, base)
    require_equal(train_in(run_of(folder, **MATRICES[layout]), tmp_path), expected)


@pytest.mark.sample("llama-pp 2", "qwen3_moe-fsdp 2 tp 2 ep 2")
@pytest.mark.parametrize("layout", ["pp 2", "fsdp 2", "fsdp 2 by block", "fsdp 2 tp 2 ep 2"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_documents_do_not_see_each_other(
    name: str, layout: str, base: Path, tmp_path: Path
) -> None:
    if "ep" in layout and name != "qwen3_moe":
        pytest.skip("of experts")
    folder, joined = _plainly(name, base)
    config = run_of(folder, data__documents="separate", **(LAYOUTS | EXPERTS)[layout])
    expected = train_plainly(config, tmp_path / "plain")
    assert abs(expected.losses[0] - joined.losses[0]) > 1e-6  # there are documents
    require_equal(train_in(config, tmp_path / "run"), expected)


def _leave_out_perceptrons() -> None:
    """Let those of Llama be used in some microbatches alone."""
    usual = modeling_llama.LlamaMLP.forward

    def sometimes(self: Any, x: Tensor) -> Tensor:
        made: Tensor = usual(self, x) if float(x[0, 0, 0]) > 0 else torch.zeros_like(x)
        return made

    modeling_llama.LlamaMLP.forward = sometimes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_module_may_be_used_first_in_a_later_microbatch(dtype: str, tmp_path: Path) -> None:
    """Automodel #3540: gradients of other dtypes, of what earlier microbatches have left out."""
    folder = make_folder("llama", tmp_path / "model")
    keys: dict[str, Any] = {"train__dtype": dtype, "train__microbatch_size": 1}
    always = train_in(run_of(folder, **keys), tmp_path / "always")
    expected = train_in(
        run_of(folder, **keys), tmp_path / "one", prepare_rank=_leave_out_perceptrons
    )
    keys |= {"mesh__dp_shard": 2, "mesh__gather": "block", "mesh__reduce_once": True}

    found = train_in(run_of(folder, **keys), tmp_path / "two", prepare_rank=_leave_out_perceptrons)

    rel = 1e-12 if dtype == "float64" else 1e-6
    assert found.norms == pytest.approx(expected.norms, rel=rel)
    assert expected.norms != pytest.approx(always.norms, rel=1e-3)
