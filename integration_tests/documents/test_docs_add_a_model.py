"""A model of one's own trains as the page says, in 60 lines, and every layout agrees on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_trainer.model import Countable, CutByExchanges, DocumentTrial, Spreading, Stage

pytestmark = pytest.mark.usefixtures("forked_programs")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-model.md"
COMMANDS = re.findall(r"^hp (.*)$", PAGE.read_text(), re.MULTILINE)
MOST_LINES = 60
MOST_METHODS = 8
PLAIN = '''
"""Nothing but torch: what is known of its modules is enough."""

import torch
import torch.nn.functional as F
from torch import nn

from hp_trainer.model import Stage


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.heads = nn.RMSNorm(dim), 4
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Plain(Stage):
    def __init__(self, config, vocab_size, *, layers, first, last, compute_dtype):
        super().__init__(compute_dtype=compute_dtype)
        self.table = nn.Embedding(vocab_size, config.dim) if first else nn.Identity()
        self.layers = nn.ModuleDict({str(index): Block(config.dim) for index in layers})
        self.head = nn.Linear(config.dim, vocab_size) if last else nn.Identity()

    def forward(self, x, *, microbatch):
        x = self.table(x)
        for block in self.layers.values():
            x = block(x)
        return self.head(x)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and a text."""
    found = tmp_path_factory.mktemp("own")
    text = PAGE.read_text()
    for language, name in (("python", "my_model.py"), ("toml", "my_model.toml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert f"`{name}`" in text
        (found / name).write_text(block)
    (found / "plain.py").write_text(PLAIN)
    return found


def hp(folder: Path, *arguments: str, status: int = 0) -> str:
    """Run a command in the folder; return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "hp_train", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_short(folder: Path) -> None:
    assert len((folder / "my_model.py").read_text().splitlines()) < MOST_LINES


def test_a_stage_has_few_methods_and_the_page_names_each() -> None:
    methods = [name for name in vars(Stage) if not name.startswith("_") and name != "width_sent"]
    assert "forward" not in methods
    methods.append("forward")
    assert len(methods) <= MOST_METHODS
    named = re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)
    assert {*methods} <= {*named}
    for capability in (Countable, CutByExchanges, DocumentTrial, Spreading):
        assert capability.__name__ in named
        listed = next(row for row in PAGE.read_text().splitlines() if capability.__name__ in row)
        own = {name for name in vars(capability) if not name.startswith("_")}
        assert own == {*re.findall(r"`(\w+)`", listed)} - {capability.__name__}


@pytest.mark.sample("all-at-once")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            "mesh.pp=2 mesh.dp_shard=2 mesh.ep=2 pipeline.schedule=zero_bubble "
            "train.recompute=full",
            id="all-at-once",
        ),
        pytest.param("mesh.cp=2 data.documents=separate", id="context"),
        pytest.param("mesh.dp_shard=2 mesh.cp=2 mesh.cp_ring=true mesh.ep=2 mesh.etp=2", id="etp"),
        pytest.param(
            "mesh.pp=2 mesh.dp_replicate=2 mesh.ep=2 pipeline.schedule=dualpipe_v "
            "pipeline.stages_per_rank=2 "
            "pipeline.overlap=true",
            id="overlap",
        ),
        pytest.param("mesh.dp_shard=2 train.compile=aot_eager", id="compiled"),
        pytest.param(
            "model.factory=plain.py:Plain model.num_experts=0 mesh.pp=2 mesh.dp_shard=2 "
            "pipeline.schedule=zero_bubble",
            id="plain",
        ),
    ],
)
def test_every_layout_trains_it_as_one_process_does(folder: Path, layout: str) -> None:
    said = hp(folder, "verify", "my_model.toml", "--steps", "2", *layout.split())
    assert "equal within 1e-12 over 2 steps" in said


def test_a_run_goes_on_in_another_layout_with_the_code_that_is_asked_for(folder: Path) -> None:
    short = ("train.steps=2", "train.dtype=bfloat16")
    hp(folder, "train", "my_model.toml", "run.name=first", "mesh.cp=2", *short)
    on = ("train", "--resume", "runs/first", "train.steps=3", "mesh.cp=1", "mesh.dp_shard=2")
    refused = hp(folder, *on, status=2)
    assert "model.factory" in refused
    assert "must be given on the command line" in refused
    hp(folder, *on, "model.factory=my_model.py:MyStage")
    lines = (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    refused = hp(folder, "export-hf", "runs/first", "exported", status=2)
    assert refused.startswith("error: model.factory ")


def test_a_plan_prices_it_and_cuts_no_matrix(folder: Path) -> None:
    plans = json.loads(hp(folder, "plan", "my_model.toml", "--gpus", "8", "--top", "20", "--json"))
    layouts = [plan["config"] for plan in plans["best"]]
    assert {layout["mesh.tp"] for layout in layouts} == {1}
    assert all(plan["memory"]["activations"] > 0 for plan in plans["best"])


@pytest.mark.sample("dry-run my_model.toml --mesh.cp 2")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(folder: Path, command: str) -> None:
    assert "my_model.toml" in command
    assert hp(folder, *command.split())


def test_attention_that_cannot_be_shared_out_is_refused(folder: Path) -> None:
    own = ("model.factory=plain.py:Plain", "model.num_experts=0", "mesh.cp=2")
    refused = hp(folder, "train", "my_model.toml", *own, status=2)
    assert "mesh.cp must be 1 for a model without hp_context.Attention" in refused
