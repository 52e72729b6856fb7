"""`python -m integration_tests.jobs.demo`: what it runs, and its page."""

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from hp_base.command_line import run_command
from integration_tests.jobs.demo import command
from integration_tests.jobs.demo.by_hand import MOST_LINES, program
from integration_tests.jobs.demo.causes import CAUSES, VERSION
from integration_tests.jobs.demo.cells import (
    DIFFERENT,
    EQUAL,
    FAILED,
    LAYOUTS,
    WITHOUT,
    Architecture,
    Bred,
    Cell,
)
from integration_tests.jobs.demo.command import run
from integration_tests.jobs.demo.page import page
from integration_tests.jobs.demo.table import table
from integration_tests.jobs.zoo.bugs import BUGS
from integration_tests.models.architectures.forks import run_ranks
from integration_tests.models.architectures.kept import finite, read, write
from integration_tests.models.architectures.shrinking import shrunk

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_the_zoo_is_run_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BUGS", [bug for bug in BUGS if bug.name == "microbatch-sum"])
    monkeypatch.setattr(command, "SOUND", ["dp"])
    monkeypatch.setattr(command, "REPORTS", [])
    monkeypatch.setattr(command, "find_spec", lambda _name: None)  # without transformers
    out = tmp_path / "page.html"

    assert run_command(run, ["--output", str(out)]) == 0

    text = capsys.readouterr().out
    assert "zoo: 1 of 1 bugs found and named, 1 of 1 sound jobs equal" in text
    assert "pip install transformers" in text
    assert "are 2 times the reference" in out.read_text()
    assert "http" not in out.read_text()


def test_a_bug_that_is_not_found_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = Bred(layout="dp", bug="no-reduce", is_right=False)
    monkeypatch.setattr(command, "_zoo", lambda: iter([missed]))
    monkeypatch.setattr(command, "find_spec", lambda _name: None)

    assert run_command(run, ["--output", str(tmp_path / "page.html")]) == 8
    assert "1 of 1 jobs of the zoo are not told rightly" in capsys.readouterr().err


def test_the_page_tells_every_cell_and_escapes_what_others_wrote() -> None:
    cells = (
        Cell(layout="fsdp 2", state=EQUAL, error=1e-15, compared=9),
        Cell(layout="tp 2", state=DIFFERENT, first="step 1 <b>", by_hand={"w": 0.5}, program="x<y"),
        Cell(layout="ep 2", state=WITHOUT),
        Cell(layout="tp 2 ep 2", state=FAILED, reason="ValueError: <script>"),
    )
    made = Architecture(name="llama", versions={"torch": "2"}, cells=cells)
    broken = Architecture(name="other", versions={}, reason="no <model>")

    text = page([], [made, broken], 3.0)

    assert "equal 1.0e-15" in text
    assert 'href="#llama-tp-2"' in text
    assert 'id="llama-tp-2"' in text
    for escaped in (
        "step 1 &lt;b&gt;",
        "x&lt;y",
        "&lt;script&gt;",
        "no &lt;model&gt;",
        "5.0e-01 w",
    ):
        assert escaped in text


def test_a_red_cell_has_its_program_folded_with_its_command() -> None:
    fields = {"vocab_size": 64, "text_config": {f"field_{i}": list(range(9)) for i in range(40)}}
    written = program("llama", fields, LAYOUTS["tp 2"])
    cell = Cell(layout="tp 2", state=DIFFERENT, program=written)

    text = page([], [Architecture(name="llama", versions={}, cells=(cell,))], 1.0)

    assert len(written.splitlines()) <= MOST_LINES
    compile(written, "written", "exec")
    assert "<code>torchrun --nproc-per-node 2 llama-tp-2.py</code>" in text
    assert f"<summary>Reproduction: {len(written.splitlines())} lines" in text


def test_a_rank_that_fails_or_hangs_is_told_and_the_others_end(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no\nmore")

    def hang() -> None:
        while True:
            pass

    assert run_ranks(int, size=1, folder=tmp_path / "a", seconds=20.0) == ""
    reason = run_ranks(fail, size=1, folder=tmp_path / "b", seconds=20.0)
    assert reason.startswith("ValueError: no (")
    reason = run_ranks(hang, size=1, folder=tmp_path / "c", seconds=0.2)
    assert reason == "hangs: not done after 0 s"


def test_a_config_is_shrunk_by_the_names_of_its_fields() -> None:
    fields = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_dropout": 0.1,
        "rms_norm_eps": 1e-6,
        "text_config": {"num_experts": 128},
    }
    small = shrunk(fields)
    assert small["vocab_size"] == 64
    assert small["layer_types"] == ["full_attention", "sliding_attention"]
    assert small["num_hidden_layers"] == 2
    assert small["attention_dropout"] == 0.0
    assert small["text_config"]["num_experts"] == 4
    assert "rms_norm_eps" not in small


def red() -> Architecture:
    cells = (
        Cell(layout="fsdp 2", state=EQUAL, error=7e-15),
        Cell(layout="tp 2", state=DIFFERENT, first="step 1, gradient", by_hand={"w": 0.9}),
        Cell(layout="ep 2", state=WITHOUT),
        Cell(layout="tp 2 ep 2", state=WITHOUT),
    )
    return Architecture(name="apertus", versions={"transformers": VERSION}, cells=cells)


def test_a_red_cell_is_told_with_its_cause_of_that_version_alone() -> None:
    newer = replace(red(), versions={"transformers": "99"})

    assert "alpha_p" in page([], [red()], 1.0)
    assert "alpha_p" not in page([], [newer], 1.0)
    assert "**A gradient lacks the other rank's part:** apertus (tp 2)" in table([red()])
    assert "**Not looked into:** apertus (tp 2)" in table([newer])


def test_the_table_has_a_row_of_each_architecture_and_why_others_have_none() -> None:
    text = table([red(), Architecture(name="blt", versions={}, reason="RuntimeError: `no`")])

    assert "| apertus | 7.0e-15 | **different** | no experts | no experts |" in text
    assert "| tp 2 | 1 | 0 | 0 |" in text
    assert "- blt: `RuntimeError: no`" in text


def test_causes_name_layouts_and_each_cell_once() -> None:
    cells = [(name, layout) for c in CAUSES for name, some in c.cells.items() for layout in some]

    assert len(set(cells)) == len(cells)
    assert {layout for _, layout in cells} <= LAYOUTS.keys()


def test_what_is_not_finite_is_kept_and_told(tmp_path: Path) -> None:
    cell = Cell(layout="tp 2", state=DIFFERENT, error=finite(math.nan), by_hand={"w": None})
    write(tmp_path, Architecture(name="other", versions={}, cells=(cell,)))

    found = read(tmp_path, Architecture)["other"]

    assert found.cells == (cell,)
    assert "not finite w" in page([], [found], 1.0)
