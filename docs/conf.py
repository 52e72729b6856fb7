"""Sphinx configuration: MyST pages, furo, and API pages from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_schedule import SCHEDULES, ScheduleKind
from hp_trainer.layout.schedules import KINDS

_DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(_DOCS), str(_DOCS.parent / "tools")]

project = "hp packages"
author = "the contributors"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "expansions",
]
exclude_patterns = [
    "_build",
    "reference/tables/search_table.md",
    "reference/tables/u_shape_table.md",
]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 3


def _schedule_row(kind: ScheduleKind) -> str:
    stages = str(kind.stages_per_rank or "any")
    stages += {"loop": "", "v": ", in a V", "u": ", rank 0 has first and last"}[kind.style]
    return f"| `{kind.generate.__name__}` | {stages} | {kind.purpose} | {kind.source} |"


_SCHEDULE_HEAD = """\
| generator | stages per rank | what it is for | source |
|---|---|---|---|
"""
# What pages say of schedules comes from the registry, so that a new one is there untold.
myst_substitutions = {
    "schedules": _SCHEDULE_HEAD + "\n".join(map(_schedule_row, SCHEDULES.values())),
    "schedule_names": ", ".join(KINDS),
    "one_stage_schedules": ", ".join(n for n, kind in KINDS.items() if kind.stages_per_rank == 1),
    "two_stage_schedules": ", ".join(n for n, kind in KINDS.items() if kind.stages_per_rank == 2),
    "paired_schedules": ", ".join(n for n, kind in KINDS.items() if kind.pairs),
}

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# "Returns:" sections are prose: what stands before a colon in them is no type.
napoleon_use_rtype = False
# A field that a class documents under "Attributes:" is also a member: described once, not twice.
napoleon_use_ivar = True

nitpicky = True
# What is documented elsewhere: torch and the libraries beside it, the standard library, and the
# type variables of our own signatures.
_ELSEWHERE = [
    "torch",
    "nn",
    "numpy",
    "msgspec",
    "tokenizers",
    "safetensors",
    *sorted(sys.stdlib_module_names),
]
_OF_RESULTS = (
    "ActivationMemory|Balanced|Belonging|Cache|Config|CountedSlice|Exact|Failure|Flip|GpuRates|"
    "Header|Held|Index|Link|Manifest|Memory|Packs|Parameter|Piece|Place|Places|Recomputation|"
    "RecordedStep|Recording|Reproduction|RowsStay|SavedTensors|Seconds|SharesGroups|Spread|"
    "StepRecorder|Store|Team|TokenFile|Transfer|TurnHolder|WeightCasts"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({'|'.join(_ELSEWHERE)})(\..*)?"),
    ("py:.*", r"(.*\.)?([A-Z]|\w+T)(_co)?"),
    # Pieces of signatures that Sphinx cuts at every comma: `<factory>` is no default it knows.
    ("py:class", r"[^\]]*\[[^\]]*"),
    # Classes that only constructors of results take, bases that classes share code by, and one that
    # torch exports without a home.
    ("py:class", rf"hp_\w+(\.\w+)*\.(_\w+|{_OF_RESULTS})"),
]


def resolve_private_module(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link ``hp_x.module.Name``, as annotations spell it, to ``hp_x.Name``, where it is documented.

    Modules are private; their public names are documented in the package that exports them.
    """
    target = str(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or not target.startswith("hp_"):
        return None
    domain = env.domains.python_domain
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        public = ".".join([*parts[:end], parts[-1]])
        if public in domain.objects:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, node.get("reftype", "obj"), public, node, contnode
            )
    return None


def keep_colons(_app: Any, what: str, *rest: Any) -> None:
    """Keep napoleon from taking the words before a colon for the type of a property.

    It does so in the first line of an attribute's docstring; an empty comment is put before that.
    """
    _name, _object, _options, lines = rest
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]


_TITLES: dict[str, Any] = {}
_NAVIGATION: dict[tuple[object, ...], object] = {}


def cut_contents(_app: Any, env: Any) -> None:
    """Keep tables of contents without what pages say of names and sections, for navigation."""
    for page, contents in env.tocs.items():
        _TITLES[page] = titles = contents.deepcopy()
        for item in [node for node in titles.findall() if node.tagname == "list_item"]:
            leads_on = any(node.tagname == "toctree" for node in item.findall())
            if item.parent is not titles and not leads_on:
                item.parent.remove(item)


def share_navigation(app: Any, page: str, _template: str, context: Any, _doctree: Any) -> None:
    """Make the navigation of titles alone, once for all pages of source code that are as deep.

    The theme has Sphinx resolve all toctrees for every page, which takes 0.1 s with all contents.
    """
    toctree = context["toctree"]

    def shared(**options: object) -> object:
        key = (page.count("/") if page.startswith("_modules/") else page, *sorted(options.items()))
        if key not in _NAVIGATION:
            contents, app.env.tocs = app.env.tocs, _TITLES
            _NAVIGATION[key] = toctree(**options)
            app.env.tocs = contents
        return _NAVIGATION[key]

    context["toctree"] = shared


def setup(app: Any) -> None:
    """Register the four above."""
    app.connect("missing-reference", resolve_private_module)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("env-check-consistency", cut_contents)
    app.connect("html-page-context", share_navigation, priority=400)
