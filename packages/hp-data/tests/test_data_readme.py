"""The example of the README runs; a training loop of torch alone reads a folder, and goes on."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from hp_data import Batch, Dataset, load_tokenizer, prepare

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("forked_programs")
def test_the_example_of_the_readme_gives_batches(tmp_path: Path) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.match(r"\d+ torch\.Size\(\[4, 32\]\) .*document", done.stdout)


def batches(text: Path, tokens: Path, steps: range, *, rank: int, ranks: int) -> list[Batch]:
    """Return what one of some ranks trains on in some steps, four sequences a step in all."""
    tokenizer = load_tokenizer("")
    prepare(tokens, paths=[str(text)], tokenizer=tokenizer, eval_fraction=0.1)
    data = Dataset.open(tokens, "train", seq_len=16, seed=7)
    each = 4 // ranks
    return [
        data.batch(range(4 * step + each * rank, 4 * step + each * (rank + 1))) for step in steps
    ]


def test_a_run_goes_on_with_other_ranks_where_it_was_stopped(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(9):
        (text / f"{number}.txt").write_text(f"document {number} " * 20)
    whole = batches(text, tmp_path / "a", range(6), rank=0, ranks=1)
    before = batches(text, tmp_path / "b", range(3), rank=0, ranks=1)
    (text / "0.txt").write_text("nobody reads this any more")
    after = [batches(text, tmp_path / "b", range(3, 6), rank=rank, ranks=2) for rank in (0, 1)]
    rows = [batch.tokens for batch in before]
    rows += [torch.cat([mine.tokens, other.tokens]) for mine, other in zip(*after, strict=True)]
    assert torch.equal(torch.stack(rows), torch.stack([batch.tokens for batch in whole]))
    assert len({tuple(row.tolist()) for batch in whole for row in batch.tokens}) == 24


def test_no_trainer_of_ours_is_needed_and_nothing_that_an_extra_brings() -> None:
    texts = [text for text in requires("hp-data") or () if "extra ==" not in text]
    needed = {re.split(r"[<>=\[ ;]", text)[0] for text in texts}
    assert needed == {"hp-base", "torch", "msgspec", "numpy"}
