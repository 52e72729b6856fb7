"""Models of transformers, trained on real text: every layout has the curve of plain transformers.

The text is the documentation of this repository, read as bytes. What was trained by `hp train` is
exported by `hp export-hf`, loaded by transformers, and must give the logits of the model that plain
transformers has trained in one process.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_platform.device import lifting
from integration_tests.models.plain_transformers import loaded, make_folder, run_of, train_plainly

pytest.importorskip("transformers", reason="of `nox -s transformers`")
pytestmark = [
    pytest.mark.usefixtures("forked_programs", "one_thread"),
    pytest.mark.filterwarnings("default"),  # of transformers
]

TEXT = Path(__file__).parents[2] / "docs"
RUN: dict[str, Any] = {
    "data.paths": str(TEXT),
    "data.seq_len": 64,
    "data.documents": "joined",
    "data.eval_fraction": 0.2,
    "train.warmup_steps": 2,
    "train.global_batch_size": 4,
    "train.microbatch_size": 2,
    "train.dtype": "float64",
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"mesh.pp": 2, "pipeline.schedule": "zero_bubble", "train.microbatch_size": 1},
        {"mesh.tp": 2},
    ),
    "qwen3_moe": (
        {"mesh.dp_shard": 2, "mesh.ep": 2},
        {"mesh.cp": 2, "mesh.cp_ring": True, "train.recompute": "full"},
    ),
    "qwen3_next": (
        {"mesh.pp": 2, "mesh.dp_shard": 2, "pipeline.schedule": "1f1b", "train.microbatch_size": 1},
        {"mesh.tp": 2, "mesh.ep": 2},
    ),
}
"""Model -> two layouts. The second has experts; the third has them and a recurrent mixer."""
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
FEWER = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""The recurrent mixer in torch's operators takes several times as long as attention."""


def trained(folder: Path, base: Path, **settings: object) -> tuple[list[float], Path]:
    """Run `hp train` and `hp export-hf`; losses, and the folder that was exported."""
    keys = {**RUN, "model.transformers": folder, "run.output_dir": base / "runs", **settings}
    flags = [f"--{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in keys.items()]
    output = hp("train", *flags)
    run = Path(output.splitlines()[-1])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    hp("export-hf", str(run), str(base / "exported"), "--dtype", "float64")
    return [row["loss"] for row in rows], base / "exported"


def hp(*arguments: str) -> str:
    """Run a command of hp-train; what it prints."""
    command = [sys.executable, "-m", "hp_train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def logits_of(model: Any) -> Tensor:
    """Logits of a little text."""
    tokens = torch.tensor([list(b"Every rank constructs every group, in one order.")])
    with lifting(), torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@pytest.mark.sample("qwen3_next-10")
@pytest.mark.parametrize("steps", [10, 200])
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_layouts_have_the_curve_and_the_logits_of_plain_transformers(
    name: str, steps: int, tmp_path: Path
) -> None:
    fields = SIZES | (FEWER if name == "qwen3_next" else {})
    folder = make_folder(name, tmp_path / "model", **fields)
    keys = {key.replace(".", "__"): value for key, value in RUN.items()}
    keys |= {"data__paths": (str(TEXT),), "train__steps": steps}
    plain = loaded(folder)
    expected = train_plainly(run_of(folder, **keys), tmp_path / "plain", plain)
    assert expected.losses[-1] < expected.losses[0] - (1.0 if steps > 100 else 0.1)
    answer = logits_of(plain)

    for index, layout in enumerate(LAYOUTS[name]):
        base = tmp_path / str(index)
        losses, exported = trained(folder, base, **layout, **{"train.steps": steps})
        apart = max(
            abs(ours / theirs - 1) for ours, theirs in zip(losses, expected.losses, strict=True)
        )
        error = float((logits_of(loaded(exported)) - answer).norm() / answer.norm())
        figures = f"{losses[0]:.3f} to {losses[-1]:.3f}, losses {apart:.1e}, logits {error:.1e}"
        sys.stdout.write(f"{name} {layout}: {figures}\n")
        assert apart <= 1e-9
        assert error <= 1e-8
