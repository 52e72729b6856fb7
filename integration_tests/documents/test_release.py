"""All packages are released together: one version, names and ranges of one form, a workflow."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import release
import yaml
from check_distributions import KEPT
from lock import HASHES, HEAD, HEAD_OF_HASHES, LOCK
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = {file.parent.name: file for file in sorted(ROOT.glob("packages/*/pyproject.toml"))}
TABLES: dict[str, dict[str, Any]] = {n: tomllib.loads(f.read_text()) for n, f in FILES.items()}
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def required(name: str) -> list[Requirement]:
    """Return what a package requires, in its extras as well."""
    project = TABLES[name]["project"]
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


def test_all_packages_have_one_version_and_its_range_of_each_other() -> None:
    [version] = {*release.versions(ROOT).values()}
    for name, file in FILES.items():
        siblings = [r for r in required(name) if r.name in FILES]
        assert {str(r.specifier) for r in siblings} <= {
            str(Requirement(f"x{release.range_of(Version(version))}").specifier)
        }
        assert all(Version(version) in r.specifier for r in siblings)
        log = (file.parent / "CHANGELOG.md").read_text()
        assert log.startswith(f"# Changelog\n\n## {version} (")


def test_what_several_packages_require_has_one_range() -> None:
    ranges: dict[str, set[str]] = defaultdict(set)
    for name in FILES:
        for requirement in required(name):
            ranges[requirement.name].add(str(requirement.specifier))
    assert len(ranges["torch"]) == 1
    assert not {name: found for name, found in ranges.items() if len(found) > 1}


def test_torch_is_capped_at_the_newest_minor_version_that_was_shown() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = re.findall(r"^\| 3\.\d+ \| 2\.(\d+) \| (?!nothing)\S", page, re.MULTILINE)
    [torch] = {str(r.specifier) for name in FILES for r in required(name) if r.name == "torch"}
    assert f"<2.{max(map(int, rows)) + 1}" in torch.split(",")


@pytest.mark.parametrize("name", FILES)
def test_a_package_is_called_and_built_as_the_others_are(name: str) -> None:
    module, table, like = name.replace("-", "_"), TABLES[name], TABLES["hp-base"]
    folder = FILES[name].parent
    assert [path.name for path in (folder / "src").iterdir() if path.suffix == ""] == [module]
    assert (folder / "src" / module / "py.typed").is_file()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    project = table["project"]
    assert project["name"] == name
    assert project.keys() - {"optional-dependencies", "scripts", "entry-points"} == {
        *like["project"].keys()
    }
    for key in ("dynamic", "readme", "requires-python", "license", "license-files"):
        assert project[key] == like["project"][key]
    more = {*project["classifiers"]} - {*like["project"]["classifiers"]}
    assert [each for each in project["classifiers"] if each not in more] == (
        like["project"]["classifiers"]
    )
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    for python in (each.rpartition(" ")[2] for each in more):  # only a Python that it was run on
        [shown] = re.findall(rf"^\| {re.escape(python)} \| 2\.\d+ \| (.*) \|$", page, re.MULTILINE)
        assert name in shown
    assert len(project["description"]) < 100
    assert table["build-system"] == like["build-system"]
    hatch = table["tool"]["hatch"]
    assert hatch["version"] == {"path": f"src/{module}/__init__.py"}
    assert hatch["build"]["targets"]["wheel"] == {"packages": [f"src/{module}"]}
    shared = {*like["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    others = {path.name for path in folder.iterdir() if path.name in KEPT}
    assert {*hatch["build"]["targets"]["sdist"]["include"]} == shared | others
    assert {*project.get("scripts", {})} <= {name, "hp"}


def test_an_extra_has_one_meaning() -> None:
    """It is what the package lacks, or the extra of the same name of packages below."""
    extras = {n: t["project"].get("optional-dependencies", {}) for n, t in TABLES.items()}
    own: dict[str, set[str]] = defaultdict(set)
    for of_package in extras.values():
        for extra, texts in of_package.items():
            for requirement in map(Requirement, texts):
                if extra not in requirement.extras:
                    own[extra].add(requirement.name)
                else:
                    assert extra in extras[requirement.name]
    assert own == {
        "az": {"adlfs"},
        "exact": {"ortools"},
        "gs": {"gcsfs"},
        "packing": {"hp-packing"},
        "parquet": {"pyarrow"},
        "runtime": {"hp-base", "hp-platform", "torch"},
        "s3": {"s3fs"},
        "tensorboard": {"tensorboard"},
        "tokenizers": {"tokenizers"},
        "transformers": {"transformers"},
        "zstd": {"zstandard"},
    }


def test_the_hashes_are_of_the_pins_and_name_no_place() -> None:
    text = HASHES.read_text()
    assert text.startswith(HEAD_OF_HASHES)
    assert "://" not in text
    assert not re.search(r"^\s*-(?!-hash=sha256:[0-9a-f]{64}( \\)?$)", text, re.MULTILINE)
    blocks = re.findall(r"^(\S.*?) \\\n((?:    --hash=\S+(?: \\\n|\n))+)", text, re.MULTILINE)
    pins = [line.strip() for line in LOCK.read_text().removeprefix(HEAD).splitlines()]
    assert [pin for pin, _ in blocks] == pins
    assert "--hash" not in LOCK.read_text()


def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def test_a_tag_starts_the_workflow_and_only_publishing_has_an_identity() -> None:
    found = workflow()
    assert found[True] == {"push": {"tags": ["v*"]}}  # YAML's `on`
    assert found["permissions"] == {}
    jobs = found["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "build": {"contents": "read"},
        "publish": {"id-token": "write"},
    }
    publish = jobs["publish"]
    assert publish["needs"] == "build"
    assert publish["environment"] == "release"
    assert not [step for step in publish["steps"] if "run" in step]
    *_, last = publish["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"]["attestations"] is True
    assert "password" not in WORKFLOW.read_text().split("publish:", 1)[1].partition("steps:")[2]
    assert "://" not in WORKFLOW.read_text()


def test_actions_of_others_are_named_by_their_commits() -> None:
    files = (WORKFLOW, ROOT / "packages" / "hp-verify" / "action.yml")
    lines = [line for file in files for line in file.read_text().splitlines() if "uses:" in line]
    assert lines
    assert not [each for each in lines if not re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", each)]


def test_what_the_workflow_runs_is_here() -> None:
    runs = [step["run"] for step in workflow()["jobs"]["build"]["steps"] if "run" in step]
    assert [run for run in runs if run.endswith("nox -s build")]
    tools = re.findall(r"tools/\w+\.py", "\n".join(runs))
    assert tools
    assert all((ROOT / tool).is_file() for tool in tools)
    sessions = {
        *re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    }
    named = [name for run in runs for name in run.partition("nox -s ")[2].split()]
    assert len(named) > 2
    assert {*named} <= sessions
    given = workflow()["jobs"]["build"]["steps"]
    assert {step["with"]["path"] for step in given if "path" in step.get("with", {})} == {"dist/"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of two packages that say which version they have."""
    for name in ("hp-base", "hp-verify"):
        package, copy = ROOT / "packages" / name, tmp_path / "packages" / name
        for file in (
            release.init_of(package),
            package / "pyproject.toml",
            package / "CHANGELOG.md",
        ):
            target = copy / file.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return tmp_path


def test_a_release_is_dated_checked_and_followed_by_the_next(clone: Path) -> None:
    [version] = {*release.versions(clone).values()}
    release.date(clone, "2026-12-01")
    assert not list(release.faults(clone, f"v{version}"))
    assert len(list(release.faults(clone, "v0.0.1"))) == 2
    release.begin(clone, Version("0.9.0"))
    assert {*release.versions(clone).values()} == {"0.9.0"}
    project = (clone / "packages" / "hp-verify" / "pyproject.toml").read_text()
    assert '"hp-base>=0.9,<0.10"' in project
    assert '"torch>=2' in project
    log = (clone / "packages" / "hp-base" / "CHANGELOG.md").read_text()
    assert log.startswith("# Changelog\n\n## 0.9.0 (unreleased)\n\n## ")
    assert f"## {version} (2026-12-01)\n" in log
    assert [line.split(" must ")[1] for line in release.faults(clone, "v0.9.0")] == [
        "have the date of 0.9.0"
    ] * 2
    with pytest.raises(ValueError, match=r"must be above that of the packages \(0\.9\.0\)"):
        release.begin(clone, Version("0.9.0"))


def test_ranges_of_a_version() -> None:
    found = {v: release.range_of(Version(v)) for v in ("0.1.3", "0.9.0", "1.4.0")}
    assert found == {"0.1.3": ">=0.1,<0.2", "0.9.0": ">=0.9,<0.10", "1.4.0": ">=1.4,<2"}
