"""The examples of the README run, and compute what one process computes."""

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from hp_platform.testing import run_distributed

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_plan_of_the_readme_is_what_it_shows(tmp_path: Path) -> None:
    plan, _ = blocks("python")
    example = tmp_path / "example.py"
    example.write_text(plan)
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "edge 0 -> 1 (activations, domain 0) (0, 1) -> (2, 3, 4)" in done.stdout
    assert done.stdout.endswith(blocks("text")[0])


def join() -> list[list[float]]:
    """Run the second example on this rank; return the gradients of its modules."""
    _, source = blocks("python")
    lines = [line for line in source.splitlines() if "process_group(" not in line]
    names: dict[str, object] = {}
    exec(compile("\n".join(lines), "join.py", "exec"), names)
    found = []
    for name in ("encoder", "decoder"):
        module = names[name]
        assert isinstance(module, nn.Linear)
        if module.weight.grad is not None:
            found.append(module.weight.grad.flatten().tolist())
    return found


def test_two_modules_on_unequal_groups_are_one_model() -> None:
    assert len(blocks("python")[1].splitlines()) <= 23
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(4, 6), nn.Linear(6, 1)
    decoder(encoder(torch.ones(8, 4))).sum().backward()
    grads = [module.weight.grad for module in (encoder, decoder)]
    for rank, found in enumerate(run_distributed(join, world_size=5)):
        expected = grads[0 if rank < 2 else 1]
        assert expected is not None
        torch.testing.assert_close(found, [expected.flatten().tolist()])
