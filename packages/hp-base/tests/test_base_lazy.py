"""A face whose names load what they need when somebody asks for them."""

import math
import subprocess
import sys
from types import ModuleType

import pytest

from hp_base.lazy import lazily


def test_a_name_is_loaded_when_it_is_asked_for_and_others_are_none() -> None:
    load, _ = lazily("package", {"sqrt": "math", "root": "math:sqrt"})
    assert load("sqrt") is load("root") is math.sqrt
    with pytest.raises(AttributeError, match="'package' has no attribute 'pi'"):
        load("pi")


def test_all_names_are_listed_before_any_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("package", "What it does.")
    monkeypatch.setitem(sys.modules, "package", package)
    package.__getattr__, package.__dir__ = lazily("package", {"sqrt": "math"})  # type: ignore[method-assign]
    assert {"sqrt", "__doc__"} <= {*dir(package)}


def test_the_package_loads_nothing_but_the_standard_library() -> None:
    program = "import sys, hp_base; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {name for name in ran.stdout.split() if not name.startswith("_")}
    assert loaded - sys.stdlib_module_names - {"hp_base"} <= {"sitecustomize", "usercustomize"}
