"""The pages describe every public name once, and have every Note that anything refers to."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from notes import label_of, notes_of, references

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
NAMES = re.compile(r"^```\{names\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"py:\w+:: (\w+)\n   :module: (\S+)$", re.MULTILINE)


def public_names(package: Path, module: str) -> set[str]:
    """Return the names in `__all__` of a module, but for the version."""
    place = package / "src" / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign([ast.Name("__all__")], names):
                return set(ast.literal_eval(names)) - {"__version__"}
    message = f"{file} must have __all__"
    raise ValueError(message)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_page_of_a_package_describes_every_public_name_once(package: Path) -> None:
    page = (ROOT / "docs" / "reference" / package.name / "api.md").read_text()
    described = {module: Counter[str]() for module in re.findall(r"automodule:: (\S+)", page)}
    for module, names in NAMES.findall(page):
        described[module].update(names.split())
    for name, module in MENTIONED.findall(page):
        if module in described:
            described[module][name] += 1
    assert described
    for module, counts in described.items():
        assert set(counts) == public_names(package, module)
        assert set(counts.values()) <= {1}


def test_no_name_of_a_lazy_face_is_that_of_a_module_below_it() -> None:
    """Once it is imported, the module would be found in place of the name."""
    faces = [
        file
        for file in ROOT.glob("packages/*/src/**/__init__.py")
        if "__getattr__" in file.read_text()
    ]
    assert len(faces) >= 7
    for face in faces:
        (source,) = (parent for parent in face.parents if parent.name == "src")
        names = public_names(source.parent, ".".join(face.parent.relative_to(source).parts))
        assert not names & {path.stem for path in face.parent.iterdir()}
        assert "__dir__" in face.read_text(), f"completion must see the names of {face}"


def sources_that_cite() -> list[Path]:
    """Return all files in which Notes are cited; not this one, which makes some up."""
    sources = [
        *ROOT.glob("packages/*/*/**/*.py"),
        *ROOT.glob("integration_tests/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "docs" / "private_torch_symbols.toml",
    ]
    return [source for source in sources if source != Path(__file__)]


def test_every_note_that_is_named_is_on_a_page_and_no_two_have_one_title() -> None:
    notes = [note for package in PACKAGES for note in notes_of(package)]
    assert len(notes) > 20
    titles = Counter(note.title for note in notes)
    assert not [title for title, times in titles.items() if times > 1]
    assert len({label_of(title) for title in titles}) == len(titles)
    assert not [note for note in notes if len(note.text) < 80]
    for source in sources_that_cite():
        assert set(references(source.read_text())) <= set(titles), source
    for package in PACKAGES:
        page = ROOT / "docs" / "reference" / package.name / "notes.md"
        assert page.exists() == bool(notes_of(package)), page
        assert not page.exists() or f"```{{notes}} {package.name}\n```" in page.read_text()


def test_every_note_is_cited_from_two_places_at_least() -> None:
    """A fact that one place relies on, or none, is a docstring or a comment there."""
    cited = Counter(
        title for source in sources_that_cite() for title in references(source.read_text())
    )
    notes = [note for package in PACKAGES for note in notes_of(package)]
    assert not [note.title for note in notes if cited[note.title] < 1 + 2]  # one defines it


def test_notes_are_found_in_docstrings_and_comments_and_end_where_they_end(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text('''"""One line.

Note [Paragraph]. Its text
has two lines:

- and a list.

No more of it; see
Note [Paragraph]. So far.

Note [Block]
    Indented.

Other text.
"""

# Note [Of a comment]: one
# more.
x = 1
''')
    found = [(note.title, note.text) for note in notes_of(tmp_path)]
    assert found == [
        ("Paragraph", "Its text\nhas two lines:\n\n- and a list."),
        ("Block", "Indented."),
        ("Of a comment", "one\nmore."),
    ]
    assert list(references("a\n    # Note\n    # [Of a comment]")) == ["Of a comment"]
