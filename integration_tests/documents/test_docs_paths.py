"""Every file and session that a README or a page of the documentation names is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("AGENTS", "CONTRIBUTING", "RELEASING", "SECURITY")),
    ROOT / "tools" / "README.md",
    *READMES,
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = r"\.github|packages|integration_tests|benchmarks|docs|tools|tests|examples|src"
# A path in text or in a command, from the root or from the package that the page is about.
IN_TEXT = re.compile(rf"(?<![\w/.-])(?:{FOLDERS}|hp_[a-z]+)/[\w./-]*\w")
IN_LINKS = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
# Names that stand for others, and what a command makes.
NOT_THERE = re.compile(r"NAME|\b_build\b|://|^mailto:")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def missing(page: Path, text: str) -> list[str]:
    """Return the paths that `text`, read as that of `page`, names and that do not exist."""
    places = [ROOT, page.parent, *ROOT.glob("packages/*/src")]
    if page.parent.name.startswith("hp-"):
        places.append(ROOT / "packages" / page.parent.name)
    named = {path for path in IN_TEXT.findall(text) if not NOT_THERE.search(path)}
    linked = {path for path in IN_LINKS.findall(CODE.sub("", text)) if not NOT_THERE.search(path)}
    lost = {path for path in named if not any((place / path).exists() for place in places)}
    return sorted(lost | {path for path in linked if not (page.parent / path).exists()})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    assert not missing(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_session_that_is_named_exists(page: Path) -> None:
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    named = set(re.findall(r"nox (?:-R )?-s ([a-z]\w*)", page.read_text()))
    assert len(sessions) > 8
    assert named <= {*sessions, "tests"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_a_test_has_the_name_of_its_file(page: Path) -> None:
    links = re.findall(r"\[(\w+)\]\([^)]*?((?:test|bench)_\w+)\.py\)", page.read_text())
    assert not [(label, file) for label, file in links if not file.endswith(label)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_is_run_exists(page: Path) -> None:
    for name in re.findall(r"-m ((?:hp_|integration_tests)[\w.]*\w)", page.read_text()):
        path = name.replace(".", "/")
        files = [
            f for end in (".py", "/__main__.py") for f in ROOT.glob(f"packages/*/src/{path}{end}")
        ]
        files += [ROOT / f"{path}{end}" for end in (".py", "/__main__.py")]
        assert any(file.is_file() for file in files), name


@pytest.mark.parametrize("readme", READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_readme_names_what_shows_its_claims(readme: Path) -> None:
    _, _, rows = readme.read_text().partition("| shown by |\n|---|---|\n")
    table = rows.partition("\n\n")[0].splitlines()
    assert len(table) > 4
    assert not [row for row in table if not re.search(r"test_\w+|bench_\w+|`nox -s \w+`", row)]


@pytest.mark.parametrize("readme", READMES[1:], ids=lambda page: page.parent.name)
def test_a_readme_names_all_that_its_package_needs_from_a_clone(readme: Path) -> None:
    (named,) = re.findall(
        r"`pip install -c constraints.txt (\./packages/[^`]*)`", readme.read_text()
    )
    found = [path for word in named.split() for path in ROOT.glob(word.rstrip("/"))]
    assert {path.name for path in found} == siblings_of(readme.parent.name)


def siblings_of(name: str) -> set[str]:
    """Return a package and those of this repository that it needs without extras."""
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[<>=]", text)[0] for text in project.get("dependencies", [])}
    return {name}.union(*(siblings_of(other) for other in needed if other.startswith("hp-")))


DOTTED = re.compile(r"`(hp_[a-z]+(?:\.\w+)+)`")


def is_there(name: str) -> bool:
    """Tell whether a dotted name is a module, or a word in the module that it begins with."""
    for source in ROOT.glob("packages/*/src"):
        place, *rest = source, *name.split(".")
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        if rest and (place / f"{rest[0]}.py").is_file():
            place /= f"{rest.pop(0)}.py"
        if place != source:
            file = place if place.is_file() else place / "__init__.py"
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
    return False


def test_every_dotted_name_on_a_page_or_in_a_source_exists() -> None:
    projects = [tomllib.loads(file.read_text()) for file in ROOT.glob("packages/*/pyproject.toml")]
    groups = {name for file in projects for name in file["project"].get("entry-points", {})}
    architecture = (ROOT / "docs" / "understand" / "architecture.md").read_text()
    assert {*re.findall(r"^\| `([\w.]+)` \| .* \| .* \|$", architecture, re.MULTILINE)} >= groups
    texts = [*PAGES, *ROOT.glob("packages/*/src/**/*.py")]
    named = {(name, text.name) for text in texts for name in DOTTED.findall(text.read_text())}
    assert len(named) > 200
    assert not {(name, text) for name, text in named if name not in groups and not is_there(name)}


def test_the_code_is_read_in_twelve_files_and_every_word_has_its_place() -> None:
    order = (ROOT / "docs" / "read-me-in-order.md").read_text()
    files = re.findall(r"^\d+\. \*\*.*?`(packages/[^`]*)`", order, re.MULTILINE | re.DOTALL)
    assert len(files) == len(set(files)) == 12
    assert all((ROOT / file).is_file() for file in files)
    rows = re.findall(
        r"^\| (?!word|---)(.*) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 40
    words = [row.split(" | ")[0] for row in rows]
    assert len(set(words)) == len(words)
    assert not [row for row in rows if not re.search(r"`hp_[a-z]+/[\w/]+\.py`$", row)]


def test_what_is_not_there_is_found() -> None:
    page = ROOT / "packages" / "hp-vtp" / "README.md"
    text = "`tests/test_vtp_plan.py`, `tests/test_gone.py`, [a](lost.md), [b](https://c/d.md#e)"
    assert missing(page, text) == ["lost.md", "tests/test_gone.py"]
