import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    example = tmp_path / "example.py"
    example.write_text(blocks[0])
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "edge 0 -> 1 (activations, domain 0) (0, 1) -> (2, 3, 4)" in done.stdout
    shown = re.search(r"^```text\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert shown
    assert done.stdout.endswith(shown[1])
