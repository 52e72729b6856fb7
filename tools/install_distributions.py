"""Install each wheel of dist/ into an empty environment of its own and run its README's example.

Siblings come from the same directory, everything else from wherever the environment variables of uv
point to. Usage, with uv on PATH: ``python tools/install_distributions.py dist``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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


def resolve_from(dist: Path, pins: Path) -> None:
    """Make uv look in `dist` and obey `pins`, besides the places and pins of its environment.

    Command-line options would take the place of the variables, torch's pin among them.
    """
    links = [os.environ.get("UV_FIND_LINKS", ""), str(dist)]
    constraints = [os.environ.get("UV_CONSTRAINT", ""), str(pins)]
    os.environ["UV_FIND_LINKS"] = ",".join(filter(None, links))
    os.environ["UV_CONSTRAINT"] = " ".join(filter(None, constraints))


def installed_torch(python: Path) -> str:
    """Return the version of torch in the environment of an interpreter, or that there is none."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    return f"torch {done.stdout.strip()}" if done.returncode == 0 else "no torch"


def install_and_run(name: str, versions: Mapping[str, str], scratch: Path) -> str:
    """Install one package alone, check the environment and run the example; return a report."""
    environment = scratch / name
    python = environment / "bin" / "python"
    uv("venv", str(environment), "--python", sys.executable)
    start = time.perf_counter()
    # uv's cache goes by name and version, and would install what an earlier build left there.
    fresh = [argument for sibling in versions for argument in ("--refresh-package", sibling)]
    requirement = f"{name}=={versions[name]}"
    uv("pip", "install", "--no-compile", "--python", str(python), *fresh, requirement)
    installed = time.perf_counter() - start
    uv("pip", "check", "--python", str(python))
    torch = installed_torch(python)
    start = time.perf_counter()
    output = run_example(ROOT / "packages" / name / "README.md", str(python))
    ran = time.perf_counter() - start
    report = f"{requirement}: installed in {installed:.1f} s ({torch}), example ran in {ran:.1f} s"
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
        resolve_from(dist, pins)
        for name in versions:
            print(install_and_run(name, versions, scratch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
