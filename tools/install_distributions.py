"""Install each wheel of dist/ into an empty environment of its own and run its README's example.

Siblings come from the same directory, everything else from wherever the environment variables of uv
point to. Usage, with uv on PATH: ``python tools/install_distributions.py dist``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_distributions import read_metadata
from readme_example import run_example

ROOT = Path(__file__).resolve().parent.parent


def uv(*arguments: str) -> None:
    """Run a command of uv, quietly.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    subprocess.run(["uv", *arguments, "--quiet"], check=True)


def torch_is_installed(python: Path) -> bool:
    """Tell whether the environment of an interpreter holds torch."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    return subprocess.run([str(python), "-c", probe], check=False).returncode == 1


def install_and_run(name: str, version: str, *, dist: Path, pins: Path, scratch: Path) -> str:
    """Install one package alone, check the environment and run the example; return a report."""
    environment = scratch / name
    python = environment / "bin" / "python"
    uv("venv", str(environment), "--python", sys.executable)
    start = time.perf_counter()
    places = ["--python", str(python), "--find-links", str(dist), "--constraint", str(pins)]
    uv("pip", "install", "--no-compile", *places, f"{name}=={version}")
    installed = time.perf_counter() - start
    uv("pip", "check", "--python", str(python))
    torch = "with torch" if torch_is_installed(python) else "without torch"
    start = time.perf_counter()
    output = run_example(ROOT / "packages" / name / "README.md", str(python))
    ran = time.perf_counter() - start
    report = f"{name} {version}: installed {torch} in {installed:.1f} s, example ran in {ran:.1f} s"
    return report + "".join(f"\n    {line}" for line in output.splitlines()[-5:])


def main(dist: Path) -> int:
    """Install every package in turn and print what each took."""
    metadata = [read_metadata(wheel) for wheel in sorted(dist.glob("*.whl"))]
    versions = {str(m["Name"]): str(m["Version"]) for m in metadata}
    with tempfile.TemporaryDirectory(dir=dist.parent, prefix=".install-") as directory:
        scratch = Path(directory)
        # A newer release of a sibling in a registry must not take the place of the wheel in dist/.
        pins = scratch / "pins.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        for name, version in versions.items():
            report = install_and_run(name, version, dist=dist, pins=pins, scratch=scratch)
            print(report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
