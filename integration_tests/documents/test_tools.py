"""The scripts behind the sessions find what they are there to find."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import lowest_siblings
import pytest
from build_distributions import differences
from check_distributions import SDIST_FILES, STATED, check_files, check_wheel
from config_walk import config_walk
from house import ROOT, arrows_of, circles_of, count_source, is_fragment, table, walk_figures
from house_walks import count, find
from lowest_siblings import lowest
from packaging.requirements import Requirement
from packaging.version import Version
from private_torch_symbols import compare, exists, scan
from readme_example import first_python_block, run_example

METADATA = """\
Metadata-Version: 2.4
Name: hp-a
Version: 0.1.0
Requires-Dist: hp-b<0.2,>=0.1

A description.
"""


def test_every_tool_has_a_line_in_the_readme() -> None:
    text = (ROOT / "tools" / "README.md").read_text()
    tools = [path for path in (ROOT / "tools").iterdir() if path.suffix == ".py"]
    assert len(tools) > 10
    assert not [tool.name for tool in tools if f"`{tool.name}`" not in text]


def symbols_of(directory: Path, source: str) -> set[str]:
    file = directory / "module.py"
    file.write_text(source)
    used, _ = scan([file])
    return set(used)


@pytest.mark.parametrize(
    ("source", "symbol"),
    [
        ("import torch\ntorch._C._name()", "torch._C._name"),
        ("import torch.distributed as d\nd._x.y.z", "torch.distributed._x.y"),
        ("from torch.distributed import _functional_collectives as f\nf.wait", ""),
        ("from torch.distributed.a import _name", "torch.distributed.a._name"),
        ("import torch\ngetattr(torch._C, '_late', None)", "torch._C._late"),
        ("import torch\ndef f(x): return x._version", "?._version"),
    ],
)
def test_scan_finds_private_symbols_however_they_are_reached(
    tmp_path: Path, source: str, symbol: str
) -> None:
    wanted = symbol or "torch.distributed._functional_collectives.wait"
    assert symbols_of(tmp_path, source) == {wanted}


def test_scan_passes_over_public_symbols_and_our_own_private_names(tmp_path: Path) -> None:
    source = """
import os
import torch
class A:
    _slots: int
    def __init__(self) -> None:
        self._own = torch.zeros(1).__len__()
def f(a: A, b: tuple[int]) -> object:
    return a._own, a._slots, os._exit, b._replace(x=torch.distributed.get_rank())
"""
    assert symbols_of(tmp_path, source) == set()


def test_scan_leaves_overridden_private_methods_to_the_list(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("class A:\n    def _name(self): pass\ndef f(x): x._name()\n")
    used, doubtful = scan([file])
    assert list(compare(used, [], doubtful)) == []
    assert list(compare(used, ["torch.B._name"], doubtful)) == []
    assert list(compare(used, ["torch.B._other"], doubtful)) == [
        "listed but not used: torch.B._other"
    ]


def test_comparison_reports_symbols_unlisted_and_symbols_unused() -> None:
    used = {"torch._a": {"x.py"}, "?._b": {"y.py"}, "torch._c": {"z.py"}}
    assert list(compare(used, ["torch._a", "torch.Tensor._b", "torch._gone"])) == [
        "not listed: torch._c in z.py",
        "listed but not used: torch._gone",
    ]


def test_symbols_are_looked_up_in_what_is_installed() -> None:
    assert exists("torch.distributed.distributed_c10d._get_default_group")
    assert not exists("torch.distributed.distributed_c10d._no_such_name")
    assert not exists("torch._no_such_module.name")


@pytest.mark.parametrize(
    ("specifier", "expected"), [(">=0.1,<0.2", "0.1.0"), (">=0.1.2,<0.2", "0.1.3"), ("", "0.1.0")]
)
def test_lowest_sibling_is_the_first_that_the_range_allows(specifier: str, expected: str) -> None:
    candidates = [Version(v) for v in ("0.2.0", "0.1.3", "0.1.0")]
    assert lowest(Requirement(f"hp-b{specifier}"), candidates) == Version(expected)


def test_lowest_sibling_fails_when_a_version_left_its_dependents_behind() -> None:
    with pytest.raises(ValueError, match=r"hp-b.* must allow one of the versions .*0\.2\.0"):
        lowest(Requirement("hp-b>=0.1,<0.2"), [Version("0.2.0")])


def test_versions_of_a_package_are_the_tags_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for version, name in (("0.1.0", "hp-a"), ("0.1.1", "hp-b")):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "pyproject.toml").write_text(version)
        git("add", ".")
        git("commit", "-m", version)
        git("tag", f"v{version}")
    monkeypatch.setattr(lowest_siblings, "ROOT", tmp_path)
    assert lowest_siblings.tagged_versions("hp-a") == [Version("0.1.0"), Version("0.1.1")]
    assert lowest_siblings.tagged_versions("hp-b") == [Version("0.1.1")]
    unpacked = lowest_siblings.unpack_tag("hp-b", Version("0.1.1"), tmp_path / "old")
    assert (unpacked / "pyproject.toml").read_text() == "0.1.1"


def test_wheel_check_names_every_fault(tmp_path: Path) -> None:
    wheel = tmp_path / "hp_a-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hp_a/__init__.py", "")
        archive.writestr("tests/test_a.py", "")
        archive.writestr("hp_a-0.1.0.dist-info/METADATA", METADATA)
    faults = list(check_wheel(wheel, {"hp-b": "0.2.0"}))
    expected = ["py.typed", "LICENSE", "['tests']", "holds tests"]
    expected += [f"states no {field}" for field in STATED]
    expected += ["hp-b here is 0.2.0"]
    assert len(faults) == len(expected)
    assert all(part in fault for part, fault in zip(expected, faults, strict=True))


def test_a_stray_file_and_a_lost_one_are_named(tmp_path: Path) -> None:
    package = tmp_path / "hp-a"
    for name in ("src/hp_a/__init__.py", "src/hp_a/lost.py", "src/hp_a/__pycache__/x.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    wheel, sdist = tmp_path / "hp_a-0.1.0-py3-none-any.whl", tmp_path / "hp_a-0.1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hp_a/__init__.py", "")
        archive.writestr("hp_a/notes.txt", "")
        archive.writestr("hp_a-0.1.0.dist-info/METADATA", METADATA)
    with tarfile.open(sdist, "w:gz") as archived:
        for name in (*SDIST_FILES, "PKG-INFO", "src/hp_a/__init__.py", "src/hp_a/lost.py"):
            archived.addfile(tarfile.TarInfo(f"hp_a-0.1.0/{name}"))
    assert list(check_files(package, wheel, sdist)) == [
        f"{wheel.name} has src/hp_a/notes.txt",
        f"{wheel.name} has no src/hp_a/lost.py",
    ]


def test_two_builds_must_have_the_same_files_and_bytes() -> None:
    assert not list(differences({"a": "1"}, {"a": "1"}))
    assert list(differences({"a": "1", "b": "2"}, {"a": "2", "c": "3"})) == [
        "a: two contents",
        "b: in the first build alone",
        "c: in the second build alone",
    ]


def test_example_is_the_first_python_block_and_runs_by_itself(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("```sh\nfalse\n```\n```python\nprint(6 * 7)\n```\n```python\n1 / 0\n```\n")
    assert first_python_block(readme.read_text()) == "print(6 * 7)\n"
    assert run_example(readme) == "42\n"


def test_failing_example_is_reported_with_what_it_printed(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("```python\nprint('before')\n1 / 0\n```\n")
    with pytest.raises(RuntimeError, match=r"(?s)status 1.*before.*ZeroDivisionError"):
        run_example(readme)


def test_the_house_counts_what_a_module_says_and_does() -> None:
    source = '''
"""A module."""
from typing import Any, cast
KEPT = 1
"""A constant."""
def f(x: Any, y: int) -> int:
    """Return it.

    Args:
        x: Of the run.
        y: The rank to send to;
            none: 0.
        z: Ranks of the run.
    """
    return cast("int", x)  # type: ignore[no-any-return]
'''
    assert count_source(source) == {
        "statements": 4,
        "texts": 3,
        "fragments": 2,
        "Any": 1,
        "cast": 1,
        "ignore": 1,
        "files": 1,
        "small": 1,
        "docstrings": 2,
        "relative": 0,
    }
    assert not is_fragment("...")


@pytest.mark.usefixtures("forked_programs")
def test_no_act_goes_further_through_the_house_than_it_has_to() -> None:
    """Bounds are loose: a few more calls per step pass, ten more per layer or tensor do not."""
    bounds = {
        "MoE forward": {"files": 14, "calls": 60},
        "quickstart step": {"calls": 12_000},
        "dense step": {"calls": 2_000},
        "saving 2M": {"calls": 4_000},
        "building a run": {"calls": 6_300},
    }
    walks = walk_figures(ROOT)
    for name, limits in bounds.items():
        for figure, limit in limits.items():
            found = int(walks[name][figure])
            assert found <= limit, f"{figure} of {name} ({found}) must be at most {limit}"


def test_the_house_has_arrows_where_loading_one_room_loads_another(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "hp-a" / "src" / "hp_a"
    (package / "b").mkdir(parents=True)
    for name in ("__init__", "b/__init__"):
        (package / f"{name}.py").touch()
    (package / "b" / "deep.py").write_text("from hp_a import c\nfrom hp_a.b import other\n")
    (package / "c.py").write_text(
        "from typing import TYPE_CHECKING\nimport hp_a.d.e\nif TYPE_CHECKING:\n    import hp_a.b\n"
    )
    (package / "d.py").write_text(
        "from hp_a.c import f\ndef g():\n    from hp_a.b import deep\nclass K: pass\n"
    )
    rooms, arrows = arrows_of(package)
    assert rooms == {"b", "c", "d"}
    assert arrows == {("b", "c"), ("c", "d"), ("d", "c")}
    assert circles_of(arrows) == [["c", "d"]]
    (package / "b" / "again.py").write_text("class K: pass\n")
    with pytest.raises(LookupError, match="K must be defined once in hp_a"):
        find(tmp_path, "hp_a", "K")


def test_the_config_enters_what_it_and_what_is_made_of_it_are_given_to(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "hp-a" / "src" / "hp_a" / "training"
    package.mkdir(parents=True)
    (package / "train.py").write_text(
        "from hp_a.training.parts import Part, alone, made\n"
        "def start(config):\n"
        "    whole = made(config.size)\n"
        "    part = Part(1, whole)\n"
        "    return alone(3), part.later(), [made(each) for each in part]\n"
    )
    (package / "parts.py").write_text(
        "from hp_a.training import below, never\n"
        "def alone(number): return never.enters(number)\n"
        "def made(size): return below.deep(size)\n"
        "class Part:\n"
        "    def __init__(self, number, whole):\n"
        "        self.whole = whole\n"
        "        self.number = never.enters(number)\n"
        "        self.of_whole()\n"
        "    def of_whole(self): return below.deep(self.whole)\n"
        "    def later(self): return never.enters(self.whole)\n"
    )
    (package / "below.py").write_text("def deep(value): return value\n")
    (package / "never.py").write_text("def enters(value): return value\n")
    # start, made, deep, Part and its method, deep again, made again
    assert config_walk(tmp_path) == {"rooms": 3, "returns": 3}


def test_the_config_of_a_run_walks_through_few_rooms() -> None:
    found = config_walk(ROOT)
    assert found["rooms"] <= 20
    assert found["returns"] <= 15


def test_a_walk_counts_frames_of_the_packages_alone(tmp_path: Path) -> None:
    file = tmp_path / "packages" / "a.py"
    names: dict[str, Any] = {}
    code = "def leaf(x): return x\ndef act(): return max(leaf(i) for i in range(3))\n"
    exec(compile(code, str(file), "exec"), names)
    # act, its generator entered and resumed until it ends, and the leaf
    assert count(tmp_path, names["act"]) == (1, 3, 1 + 4 + 3)
    assert count(tmp_path / "other", names["act"]) == (0, 0, 0)


def test_figures_are_shown_before_and_after() -> None:
    shown = table({"a": {"calls": 3, "files": 1}}, {"a": {"calls": 5, "files": 1}})
    assert [line.split() for line in shown.splitlines()] == [
        ["calls", "files"],
        ["a", "5", ">", "3", "1"],
    ]
