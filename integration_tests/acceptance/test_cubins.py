"""No Triton kernel without a compiled launch and limits; limits that bind; no narrow address."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.acceptance.cubins import limits
from integration_tests.acceptance.cubins.intervals import overflows
from integration_tests.acceptance.cubins.limits import Resources
from integration_tests.acceptance.cubins.passed import PASSED, passed

ROOT = Path(__file__).resolve().parents[2]
ONE = Resources(registers=32, stack=0, shared=64, size=9000)


def _kernels_in_sources() -> set[str]:
    """Functions that are decorated with something of a module named triton."""
    found = set()
    for file in ROOT.glob("packages/*/src/**/*.py"):
        module = ".".join(file.relative_to(file.parents[-1]).with_suffix("").parts).split(".src.")[
            1
        ]
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue  # private ones are compiled within those that call them
            decorators = node.decorator_list
            if any(ast.unparse(d).startswith("triton.") for d in decorators):
                found.add(f"{module}.{node.name}")
    return found


def test_every_kernel_in_the_sources_has_limits() -> None:
    _, table = limits.read()
    kernels = _kernels_in_sources()
    assert len(kernels) >= 3
    assert kernels == {name.split()[0] for name in table} - {"inductor"}


def test_no_thread_of_a_kernel_of_ours_has_a_stack() -> None:
    _, table = limits.read()
    assert all(most.stack == 0 for name, most in table.items())


def test_a_kernel_that_nothing_launches_is_named() -> None:
    table = {"a.kernel bf16 sm_90": ONE}
    assert not limits.problems(table, table, kernels={"a.kernel"})
    [line] = limits.problems(table, table, kernels={"a.kernel", "a.new"})
    assert line.startswith("a.new: no launch of it is compiled")


@pytest.mark.parametrize("name", ["registers", "stack", "shared", "size"])
def test_what_exceeds_its_limit_is_named(name: str) -> None:
    row = "a.kernel bf16 sm_90"
    more = Resources(**{**vars(ONE), name: getattr(ONE, name) + 1})
    [line] = limits.problems({row: more}, {row: ONE}, kernels=())
    assert line.startswith(f"{row}: {name} ({getattr(more, name)}) must be <= ")


def test_a_row_without_limits_and_limits_without_a_row_are_named() -> None:
    lines = limits.problems({"new bf16 sm_90": ONE}, {"old bf16 sm_90": ONE}, kernels=())
    assert [line.split(":")[0] for line in lines] == ["old bf16 sm_90", "new bf16 sm_90"]


def test_the_table_reads_as_it_was_written(tmp_path: Path) -> None:
    table, versions = {"a.kernel bf16 sm_90": ONE}, {"torch": "2.13.0", "triton": "3.9.0"}
    limits.write(versions, table, tmp_path / "limits.toml")
    assert limits.read(tmp_path / "limits.toml") == (versions, table)


def test_a_new_kernel_is_found_by_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches  # noqa: PLC0415

    package = tmp_path / "stranger"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rows.py").write_text(
        "import triton\nfrom hp_expert.kernels.triton_kernels import gather_rows\n\n"
        "@triton.autotune([triton.Config({})], key=[])\n@triton.jit\ndef fresh(x):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = launches.discover(["stranger"])
    monkeypatch.delitem(sys.modules, "stranger.rows")
    assert found == {"stranger.rows.fresh"}


def test_a_cubin_is_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import toolchain  # noqa: PLC0415

    # Triton's cache knows a kernel by its source, wherever it was.
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    source = (
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef fill(x):\n    tl.store(x, 1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    measured = []
    for name in ("short", "of_another_name" * 8):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.py").write_text(source)
        fill = importlib.import_module(f"{name}.rows").fill
        with toolchain.collecting_launches(90) as launched:
            fill[(1,)](torch.empty(1, device="meta"), enable_fp_fusion=False)
        [(_, made)] = launched
        measured.append(toolchain.resources(made, 90))
        monkeypatch.delitem(sys.modules, f"{name}.rows")
    assert measured[0] == measured[1]


def test_every_module_of_every_package_is_looked_at_for_kernels() -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches  # noqa: PLC0415

    names = {folder.name.replace("-", "_") for folder in (ROOT / "packages").iterdir()}
    assert set(launches.PACKAGES) == names
    assert launches.discover(launches.PACKAGES) == _kernels_in_sources()


@pytest.mark.parametrize("capability", [90, 100])
def test_what_launchers_launch_compiles_within_its_limits(capability: int) -> None:
    triton = pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches  # noqa: PLC0415

    versions, table = limits.read()
    if versions["triton"] != triton.__version__:
        pytest.skip(f"limits are those of Triton {versions['triton']}")
    kernels = launches.discover(launches.PACKAGES)
    measured = {
        f"{kernel} {dtype} sm_{capability}": most
        for kernel, by_dtype in launches.compiled_launches(capability).items()
        for dtype, most in by_dtype.items()
    }
    allowed = {name: most for name, most in table.items() if name in measured}
    assert limits.problems(measured, allowed, kernels=kernels) == []


def test_no_address_of_a_kernel_is_computed_in_32_bits_that_may_not_hold_it() -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches  # noqa: PLC0415

    assert launches.narrow_addresses(90) == []


def test_what_the_packages_pass_to_kernels_is_compiled() -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches  # noqa: PLC0415

    assert launches.not_compiled(PASSED, 90) == []
    [line] = launches.not_compiled({"gather_rows bfloat16 bfloat16 uint8"}, 90)
    assert line == "gather_rows bfloat16 bfloat16 uint8: is passed, and not compiled"


def test_sizes_that_differ_from_step_to_step_compile_no_kernel_anew() -> None:
    pytest.importorskip("triton", reason="nox -s cubins")
    from integration_tests.acceptance.cubins import launches, toolchain  # noqa: PLC0415

    with toolchain.collecting_launches(90) as launched:
        for num_rows in (1, 7, 16):
            launches.launch_sizes(num_rows)
    kernels = {launches.full_name(kernel) for kernel, _ in launched}
    assert len({made.hash for _, made in launched}) == len(kernels) == 9


def test_what_layers_pass_to_kernels_is_listed() -> None:
    assert passed() == PASSED


GATHER = """
#loc = loc("kernels.py":17:1)
module {
  tt.func public @gather_rows(%out: !tt.ptr<bf16> loc("out"(#loc)), %x: !tt.ptr<bf16> \
loc("x"(#loc)), %token_of: !tt.ptr<i32> loc("t"(#loc)), %width: i32 loc("w"(#loc))) {
    %c64 = arith.constant 64 : i32 loc(#loc)
    %position = tt.get_program_id x : i32 loc(#loc)
    %wide = arith.extsi %position : i32 to i64 loc(#loc)
    %block = tt.get_program_id y : i32 loc(#loc)
    %start = arith.muli %block, %c64 : i32 loc(#loc)
    %column = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32> loc(#loc)
    %starts = tt.splat %start : i32 -> tensor<64xi32> loc(#loc)
    %columns = arith.addi %starts, %column : tensor<64xi32> loc(#loc)
    %at = tt.addptr %token_of, %wide : !tt.ptr<i32>, i64 loc(#loc)
    %token = tt.load %at : !tt.ptr<i32> loc(#loc2)
    OFFSET
    %from = tt.splat %row : !tt.ptr<bf16> -> tensor<64x!tt.ptr<bf16>> loc(#loc2)
    %each = tt.addptr %from, %columns : tensor<64x!tt.ptr<bf16>>, tensor<64xi32> loc(#loc2)
    %value = tt.load %each : tensor<64x!tt.ptr<bf16>> loc(#loc2)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("kernels.py":30:19)
#loc2 = loc("row"(#loc1))
"""


@pytest.mark.parametrize(
    ("offset", "found"),
    [
        (
            """%offset = arith.muli %token, %width : i32 loc(#loc2)
    %row = tt.addptr %x, %offset : !tt.ptr<bf16>, i32 loc(#loc2)""",
            {"arith.muli at kernels.py:30"},
        ),
        (
            """%w = arith.extsi %width : i32 to i64 loc(#loc2)
    %t = arith.extsi %token : i32 to i64 loc(#loc2)
    %offset = arith.muli %t, %w : i64 loc(#loc2)
    %row = tt.addptr %x, %offset : !tt.ptr<bf16>, i64 loc(#loc2)""",
            set(),
        ),
        (
            """%sum:2 = scf.for %i = %c64 to %width step %c64 iter_args(%a = %c64, %b = %c64) \
-> (i32, i32)  : i32 {
      %more = arith.addi %a, %c64 : i32 loc(#loc2)
      scf.yield %more, %b : i32, i32 loc(#loc2)
    } loc(#loc2)
    %row = tt.addptr %x, %sum#0 : !tt.ptr<bf16>, i32 loc(#loc2)""",
            {"arith.addi at kernels.py:30"},
        ),
    ],
    ids=["product of 32 bits", "product of 64 bits", "sum over a loop"],
)
def test_an_address_that_32_bits_may_not_hold_is_named(offset: str, found: set[str]) -> None:
    lines = overflows(GATHER.replace("OFFSET", offset))
    assert {line.partition(" gives [")[0] for line in lines} == found
    assert all(line.endswith(" in 32 bits, used at kernels.py:30") for line in lines)
