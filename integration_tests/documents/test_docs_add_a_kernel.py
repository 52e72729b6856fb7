"""Kernels are added as the pages say: to attention by a file, to experts by a class."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from integration_tests.documents.stand_ins import python

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "packages"
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def apply(diff: str, file: Path) -> None:
    """Change a file as a page shows it, in hunks that fit in one place each."""
    text = file.read_text()
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.split("\n")
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    file.write_text(text)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of hp_context with what the page adds."""
    page = DOCS / "how-to" / "add-an-attention-kernel.md"
    folder = tmp_path_factory.mktemp("attention")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGES / "hp-context" / "src", folder, ignore=ignored, dirs_exist_ok=True)
    kernel, test = blocks(page, "python")
    [entry] = blocks(page, "diff")
    for block, name, place in (
        (kernel, "padded.py", folder / "hp_context" / "kernels"),
        (test, "test_context_padded.py", folder),
    ):
        assert f"`{name}`" in page.read_text()
        (place / name).write_text(block)
    apply(entry, folder / "hp_context" / "kernels" / "__init__.py")
    return folder


MODES = """
import torch
import torch.distributed as dist
from hp_context import Attention, Causal, ContextParallel, shard_sequence
from hp_context.kernels import padded
from hp_platform.testing import run_distributed

MODES = [ContextParallel(1), ContextParallel(ring=True)]


@torch.no_grad()
def worst() -> list[float]:
    calls, kernel = [], padded.forward
    padded.forward = lambda *a, **k: calls.append(a) or kernel(*a, **k)
    torch.manual_seed(0)
    whole = [torch.randn(1, 16, 4, size, dtype=torch.float64) for size in (8, 8, 5)]
    expected = shard_sequence(Attention(Causal())(*whole), dist.group.WORLD)
    errors = []
    for mode in MODES:
        core = mode.apply(Attention(Causal()), dist.group.WORLD)
        calls.clear()
        out = core(*(shard_sequence(x, dist.group.WORLD) for x in whole))
        errors.append(float((out - expected).abs().max()) if calls else 1.0)
    return errors


def test_modes() -> None:
    assert max(map(max, run_distributed(worst, world_size=2))) < 1e-12
"""


@pytest.fixture(scope="module")
def passed_of_attention(attention: Path) -> list[str]:
    """Tests that passed with the added kernel: its own, those of all kernels, and of two modes."""
    (attention / "test_modes.py").write_text(MODES)
    tests = PACKAGES / "hp-context" / "tests" / "test_context_kernels.py"
    chosen = "padded or test_modes or (blocks_of_keys_make_up_attention and plain)"
    settings = ("-v", "-c", str(ROOT / "pyproject.toml"), "-k", chosen)
    own = ("test_context_padded.py", "test_modes.py")
    printed = python(attention, "-m", "pytest", *settings, *own, str(tests))
    return re.findall(r"::(\w+).* PASSED", printed)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("test_padded_values_and_plain_torch_agree", 3),
        ("test_blocks_of_keys_make_up_attention_and_its_gradients", 36),
        ("test_modes", 1),
    ],
    ids=["its own test", "tests of all kernels", "modes that compute by blocks"],
)
def test_an_added_attention_kernel_passes(
    name: str, count: int, passed_of_attention: list[str]
) -> None:
    assert passed_of_attention.count(name) == count


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two files of the page."""
    page = DOCS / "how-to" / "add-an-expert-kernel.md"
    folder = tmp_path_factory.mktemp("experts")
    names = ("fp8_products.py", "test_fp8_products.py")
    for block, name in zip(blocks(page, "python"), names, strict=True):
        assert f"`{name}`" in page.read_text()
        (folder / name).write_text(block)
    return folder


@pytest.mark.usefixtures("forked_programs")  # with hp_expert as it is
def test_the_tests_of_an_expert_kernel_pass_and_experts_over_ranks_take_it(experts: Path) -> None:
    (experts / "test_ranks.py").write_text("""
import torch
import torch.distributed as dist
from fp8_products import RoundedProducts
from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform.testing import run_distributed


def layer() -> MoE:
    torch.manual_seed(0)
    moe = MoE(TopKRouter(32, 4, 2), GroupedExperts(4, 32, 64))
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    moe.experts.products = RoundedProducts()
    return moe


@torch.no_grad()
def error() -> float:
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    alone, spread = layer(), layer()
    ExpertParallel().apply(spread, dist.group.WORLD)
    (expected, *_), (actual, *_) = alone(x), spread(x)
    return float((actual - expected).abs().max() / expected.abs().max())


def test_ranks() -> None:
    assert max(run_distributed(error, world_size=2)) < 1e-6
""")
    tests = ("test_fp8_products.py", "test_ranks.py")
    assert "3 passed" in python(experts, "-m", "pytest", "-q", *tests)
