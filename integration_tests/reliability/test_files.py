"""What the processes of a run open outside of its directory: no more than a page says."""

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from integration_tests.reliability.test_train_command import TINY
from integration_tests.runs import write_corpus

ROOT = Path(__file__).parents[2]
_PAGE = ROOT / "docs" / "reference" / "files.md"
_WATCH = """
import os, sys
_log = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND)
_PATHS = {"open": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2,
          "os.listdir": 1, "os.scandir": 1, "shutil.rmtree": 1, "ctypes.dlopen": 1}
def _hook(event, args):
    for path in args[: _PATHS.get(event, 0)]:
        if isinstance(path, (str, bytes, os.PathLike)):
            path = os.fsencode(path)
            # What has no slash in front is below a folder that is open, or the current one.
            if path.startswith(b"/"):
                os.write(_log, path + b"\\n")
sys.addaudithook(_hook)
"""


@pytest.mark.sample
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_run_opens_nothing_that_the_page_does_not_list(compiler: str, tmp_path: Path) -> None:
    for name in ("watch", "home", "tmp", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(_WATCH)
    log = tmp_path / "watch" / "paths"
    log.touch()
    env = {k: v for k, v in os.environ.items() if not k.endswith(("_CACHE_DIR", "_CACHE_HOME"))}
    env |= {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "WATCHED": str(log),
        # An empty name in it would be the current folder.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(tmp_path / "watch"), env.get("PYTHONPATH")])
        ),
    }
    (tmp_path / "tmp").chmod(0o1777)  # as /tmp is
    keys: dict[str, object] = {
        "mesh.pp": 1,
        "pipeline.stages_per_rank": 1,
        "model.num_layers": 1,
        "train.steps": 1,
    }
    keys |= {"data.paths": write_corpus(tmp_path), "train.compile": compiler}
    keys["launch.hang_seconds"] = 1000  # a machine that is busy compiles for minutes
    keys |= {"run.output_dir": tmp_path / "out", "mesh.dp_replicate": 1, "mesh.ep": 1}
    subprocess.run(
        # With a flag it has an interpreter of its own, which looks at its `sitecustomize`.
        [sys.executable, "-s", "-P", "-m", "hp_train", "train"]
        + [f"--{key}={value}" for key, value in (TINY | keys).items()],
        cwd=tmp_path / "here",
        env=env,
        check=True,
        timeout=1200,
        stdout=subprocess.DEVNULL,
    )
    found = {os.path.normpath(line) for line in log.read_text(errors="replace").splitlines()}
    # Processes of all kinds were watched: those of the ranks write and compile.
    assert any("/checkpoints/" in path for path in found)
    assert any("/hp-train-compiled/inductor/" in path for path in found) == (compiler == "inductor")
    assert sorted(path for path in found if not _is_listed(Path(path), tmp_path)) == []
    assert list((tmp_path / "here").iterdir()) == []
    own = tmp_path / "tmp" / f"hp-train-{os.geteuid()}"
    assert list((tmp_path / "tmp").iterdir()) == [own]
    assert own.stat().st_mode & 0o777 == 0o700


def _is_listed(path: Path, folder: Path) -> bool:
    """Whether a path is one of those that the page has, each named here as it is there."""
    text = _PAGE.read_text()
    cache = folder / "home" / ".cache"
    compiled = cache / "hp-train-compiled"
    listed = {f"`COMPILED/{sub.name}`": sub for sub in compiled.iterdir() if sub.is_dir()}
    listed |= {
        "`TEMPORARY`": folder / "tmp" / f"hp-train-{os.geteuid()}",
        "`~/.cache/hp-train`": cache / "hp-train",
        "`~/.cache/hp-plan`": cache / "hp-plan",
        **{f"`{name}`": Path(name) for name in ("/etc", "/proc", "/sys", "/usr/share")},
        **{f"`{name}`": Path(name) for name in ("/dev/null", "/dev/urandom")},
    }
    listed["run directory"] = folder / "out"
    missing = [name for name in listed if name not in text]
    assert not missing, missing
    libraries: list[str | Path] = [
        ROOT,
        sys.prefix,
        sys.base_prefix,
        "/usr/lib",
        "/lib",
        *site.getsitepackages(),
    ]
    libraries += [sysconfig.get_path("stdlib"), "/usr/bin", "/usr/include"]
    allowed = [*listed.values(), *libraries, folder / "corpus.jsonl", folder / "watch"]
    if path.parent == folder / "tmp" and len(path.name) == 8:
        return True  # what `tempfile` looks with where it can write
    # Folders above them are made, or looked at on the way.
    return any(path.is_relative_to(a) or Path(a).is_relative_to(path) for a in allowed)
