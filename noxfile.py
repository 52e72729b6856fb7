"""Sessions: one per package, then the checks that span packages.

    nox                          # everything that must pass, three sessions side by side
    nox -s train                 # train the quickstart model
    nox -s tests-hp-schedule     # one package, with only what it declares installed
    nox -R -s tests-hp-expert -- -k permute    # again, nothing reinstalled

Everything comes at the version that constraints.txt pins. Two variables name another torch:

    HP_TORCH        a requirement ("torch==2.11.0"), or the path or URL of a wheel; replaces the pin
    HP_TORCH_INDEX  the URL of an index, or a directory of wheels, to look in as well

With HP_HASHES=1 uv compares every file that it installs with tools/hashes.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from sessions import (
    CUDA_BUILD_GIB,
    PACKAGES,
    ROOT,
    SCRATCH,
    SOURCES,
    TORCH,
    environment,
    files_of,
    install,
    local_closure,
    print_times_at_the_end,
    run_pytest,
    session_testing,
    timed,
    with_extras,
)

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
# Sessions that are named print as they go. Each waits now and then, for ranks and time-outs, so
# there is one more than the two cores that they are meant for.
nox.options.parallel = 3 if len(sys.argv) == 1 else 1
print_times_at_the_end()

# Tests that look at files alone.
_ABOUT_TEXT = (
    "connections",
    "docs_errors",
    "docs_names",
    "docs_paths",
    "mutants",
    "pins",
    "release",
)
TEXT_TESTS = files_of("integration_tests/documents", [f"test_{name}.py" for name in _ABOUT_TEXT])
# Their versions are pinned in integration_tests/jobs/libraries. From Python 3.12 on there are newer
# ones of Megatron and of TRL, which takes no torchtitan beside it.
LIBRARIES = ("deepspeed", "megatron-core", "torchtitan; python_version < '3.12'", "triton", "trl")
LIBRARIES_TEST = "integration_tests/jobs/test_verify_libraries.py"
# The half of the integration tests that is a session of its own.
COMPARING = (
    "jobs/**/test_*.py",
    "layouts/pairs/test_*.py",
    "layouts/test_verify_*.py",
    "layouts/test_planned_steps.py",
)
COMPARING_TESTS = [f for f in files_of("integration_tests", COMPARING) if f != LIBRARIES_TEST]
# Of each package, the tests that need transformers; elsewhere they are skipped.
TRANSFORMERS_TESTS = {
    "hp-context": "test_context_transformers*.py",
    "hp-expert": "test_expert_transformers*.py",
    "hp-overlap": "test_overlap_transformers.py",
    "hp-schedule": "test_schedule_runtime_split_model.py",
    "hp-train": "test_train_transformers*.py",
    "hp-transformers": "test_transformers_model_*.py",
}
# hp-schedule plans without torch: only the tests of its runtime may need it.
RUNTIME_TESTS = "test_*runtime*.py"
LONGEST = ("hp-trainer", "hp-context", "hp-expert", "hp-train", "hp-dry", "hp-platform")


@nox.session(allow_parallel=True)
@timed
def lint(session: nox.Session) -> None:
    """Check format, style, the layering of packages and the private torch symbols in use."""
    install(session, group="lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})
    session.run("python", "tools/private_torch_symbols.py")


@nox.session(allow_parallel=True)
@timed
def api(session: nox.Session) -> None:
    """Compare each package's public names with packages/*/api.txt; `-- --write` rewrites those."""
    install(session, group="api")
    session.run("python", "tools/public_api.py", *session.posargs)


# Sessions that take long come first: what runs beside others at the end is short.
@nox.session(allow_parallel=True)
@timed
def integration(session: nox.Session) -> None:
    """Run the packages together, and examples and tools."""
    install(session, "hp-train[packing]", group="test-torch")
    session.run("python", "tools/private_torch_symbols.py", "--installed")
    elsewhere = (*TEXT_TESTS, *COMPARING_TESTS, LIBRARIES_TEST)
    ignored = (f"--ignore={file}" for file in elsewhere)
    run_pytest(session, "integration_tests", *ignored, *session.posargs)


@nox.session(allow_parallel=True)
@timed
def comparisons(session: nox.Session) -> None:
    """Run the tests of `hp verify` and `hp-verify`: what is equal, and mistakes that they find."""
    install(session, "hp-train[packing]", group="test-torch")
    run_pytest(session, *COMPARING_TESTS, *session.posargs)


for _name in sorted(PACKAGES, key=lambda name: (*LONGEST, name).index(name)):
    _session = nox.session(name=f"tests-{_name}", tags=["tests"], allow_parallel=True)
    if _name == "hp-schedule":
        _session(timed(session_testing(_name, without=RUNTIME_TESTS)))
        _session = nox.session(name=f"tests-{_name}-runtime", tags=["tests"], allow_parallel=True)
        _session(timed(session_testing(f"{_name}[runtime]", only=RUNTIME_TESTS)))
    else:
        _session(timed(session_testing(with_extras(_name))))


@nox.session(allow_parallel=True)
@timed
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    install(session, *map(with_extras, PACKAGES), group="docs")
    # -E: pages that an earlier build has read would keep their warnings to themselves.
    session.run("sphinx-build", "-W", "-n", "-E", "-q", "docs", "docs/_build/html")
    session.log("open docs/_build/html/index.html")


@nox.session(name="models-sample", allow_parallel=True)
@timed
def models_sample(session: nox.Session) -> None:
    """Run cells of the table of models, each also with a mistake; mutants; two round trips."""
    install(session, "hp-train[packing]", group="test-transformers")
    table = "integration_tests/models/test_transformers_table.py"
    folders = "integration_tests/models/test_transformers_folders.py"
    trips = "integration_tests/models/test_transformers_round_trip.py::test_a_"
    family, model = (
        "family_comes_out_as_it_came_in",
        "model_of_transformers_comes_out_as_it_came_in",
    )
    some = () if session.posargs else (f"{trips}{family}[qwen3]", f"{trips}{model}[gpt2]")
    run_pytest(session, table, folders, *some, *session.posargs)


@nox.session(allow_parallel=True)
@timed
def pages(session: nox.Session) -> None:
    """Check what pages say of files, sessions, errors and names, and the pins; without torch."""
    install(session, group="test")
    run_pytest(session, *TEXT_TESTS, *session.posargs)


@nox.session(allow_parallel=True)
@timed
def mypy(session: nox.Session) -> None:
    """Check the types of packages and all tests at once, then of tools, benchmarks and sessions."""
    install(session, *map(with_extras, PACKAGES), group="type")
    # Packages and tests know each other by other names than those of scripts, so these come apart.
    tests = [f"packages/{name}/tests" for name in PACKAGES]
    session.run("mypy", *SOURCES, *tests, "integration_tests")
    pages = files_of("docs", ["*.py"])  # and nothing of what was built there
    session.run("mypy", "noxfile.py", "conftest.py", "tools", "benchmarks", *pages)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Write pins and hashes anew: `nox -s lock -- --upgrade-package ruff`, or only what is new."""
    install(session, group="sessions")
    # What the pins are to be is not bound by what they were, and hashes are those of the registry.
    bound = ("UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "UV_FIND_LINKS", "UV_INDEX")
    unbound = dict.fromkeys(bound)
    session.run("python", "tools/lock.py", *session.posargs, env=unbound)


@nox.session(venv_backend="none", default=False)
def whole(session: nox.Session) -> None:
    """Queue every session of tests with all their cases, of which the rest run a sample."""
    os.environ["HP_WHOLE"] = "1"
    for name in [f"tests-{name}" for name in PACKAGES]:
        session.notify(name)
    session.notify("tests-hp-schedule-runtime")
    session.notify("integration")
    session.notify("comparisons")


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train: `nox -s train -- CONFIG --section.key value` passes all of it to `hp train`."""
    install(session, "hp-train", group="")
    session.run("hp", "train", *session.posargs)


@nox.session(default=False)
def verify(session: nox.Session) -> None:
    """Compare every pair of a feature and a setting, then 150 layouts over 20 steps.

    The pairs go on where they were stopped; `-- pairs` compares these alone, `-- pairs --part 1/4`
    a part of them. `-- --steps 2` and other options are for the layouts alone.
    """
    install(session, "hp-train[packing]", group="")
    text = Path(session.create_tmp()) / "documents.jsonl"
    documents = [f"{i}, squared {i * i}. "[: 3 + i % 19] * (1 + i % 29 // 28) for i in range(3000)]
    text.write_text("".join(f'{{"text": "{each}"}}\n' for each in documents))
    only_pairs = session.posargs[:1] == ["pairs"]
    if only_pairs or not session.posargs:
        kept = ("--results", str(SCRATCH / "verify-pairs.jsonl"), "--data", str(text))
        model = "integration_tests/layouts/pairs/model.toml"
        command = ("python", "-m", "integration_tests.layouts.pairs", model)
        session.run(*command, *kept, *session.posargs[1:])
    if not only_pairs:
        defaults = ("--generate", "150", "--steps", "20", "--data", str(text))
        model = "integration_tests/verify.toml"
        session.run("hp", "verify", model, *defaults, *session.posargs)


@nox.session(default=False)
def dryrun(session: nox.Session) -> None:
    """Dry runs of all configs on 8, 64 and 256 GPUs; their memory against real runs on the CPU.

    It goes on where it was stopped; `-- --part 1/2` is half of the dry runs alone.
    """
    install(session, "hp-train[packing]", group="test-torch")
    if not session.posargs:
        memory = "integration_tests/layouts/test_dry_memory.py"
        run_pytest(session, memory, env={"HP_WHOLE": "1"})
    results = str(SCRATCH / "dry-runs.jsonl")
    session.run("python", "tools/dry_runs.py", "--results", results, *session.posargs)


@nox.session(default=False)
def reliability(session: nox.Session) -> None:
    """Kill ranks, damage checkpoints, fuzz configs, reload in 60 layouts; hostile checkpoints."""
    install(session, "hp-train[packing]", group="test-torch")
    session.run("python", "-m", "integration_tests.reliability", *session.posargs)
    if not session.posargs:
        names = ("hostile", "background", "faults", "dcp")
        patterns = [f"hp-checkpoint/tests/test_checkpoint_{name}.py" for name in names]
        tests = files_of("packages", [*patterns, "hp-train/tests/test_train_dcp.py"])
        run_pytest(session, *tests)
        nodes = "integration_tests/reliability/test_torchrun_restarts.py"
        run_pytest(session, nodes, env={"HP_SLOW_RESTARTS": "1"})


@nox.session(default=False)
def rules(session: nox.Session) -> None:
    """Start 2,000 drawn configs that rules accept, and of each rule some that it alone refuses.

    An hour at most; it goes on where it was stopped. `-- --minutes 10` is a shorter part. Take away
    .nox/rules to begin anew.
    """
    install(session, "hp-train[packing]", group="test-torch")
    kept = ("--results", str(SCRATCH / "rules"))
    session.run("python", "-m", "integration_tests.reliability.accepted", *kept, *session.posargs)


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Change valid schedules 20,000 times; validation must refuse exactly what does not run."""
    install(session, "hp-schedule", group="test")
    tests = "packages/hp-schedule/tests/test_schedule_mutations.py"
    env = {"HP_SCHEDULE_MUTANTS": "20000", "HP_SCHEDULE_EXHAUSTIVE": "1"}
    run_pytest(session, "-s", tests, *session.posargs, env=env)


@nox.session(default=False)
def exact(session: nox.Session) -> None:
    """Search schedules against CP-SAT: 5,000 results and all bounds, optima, windows; no torch."""
    install(session, "hp-schedule[exact]", group="test")
    names = ("exact", "orders", "search", "bounds")
    patterns = [f"test_schedule_{name}.py" for name in names]
    tests = files_of("packages/hp-schedule/tests", patterns)
    run_pytest(session, "-s", *tests, env={"HP_SCHEDULE_BOUNDS": "1000"})


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Make small wrong changes, one by one: the tests of the default run must find 95 % of them.

    It goes on where it was stopped; `-- NAME` tries those changes alone. Take away .nox/mutants to
    begin anew. Commit first: it is the last commit that is changed.
    """
    install(session, *map(with_extras, PACKAGES), group="test-torch")
    session.run("python", "tools/mutants", "record")
    session.run("python", "tools/mutants", "run", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those named: `nox -s bench -- benchmarks/bench_ranks.py`."""
    install(session, "hp-train[packing]", group="test-transformers")
    for script in session.posargs or files_of("benchmarks", ["bench_*.py"]):
        session.run("python", script)


@nox.session(default=False)
def storage(session: nox.Session) -> None:
    """Read data from a server of S3's protocol on loopback, also when it fails."""
    install(session, "hp-data[parquet,s3,tokenizers,zstd]", group="test-storage")
    run_pytest(session, "packages/hp-data/tests/test_data_s3.py", *session.posargs)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the acceptance kit (docs/how-to/gpus.md), on the torch that HP_TORCH[_INDEX] names."""
    install(session, *map(with_extras, PACKAGES), group="test-transformers")
    session.run("python", "-m", "integration_tests.acceptance", *session.posargs)


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Test hp-expert's Triton kernels in Triton's interpreter, and blocks built by inductor."""
    install(session, *map(with_extras, PACKAGES), group="test-triton")
    patterns = ["hp-expert/tests/test_expert_*kernels.py", "hp-*/tests/test_*_compile.py"]
    tests = files_of("packages", patterns)
    # Each in its own process: an interpreter must be chosen before anything imports Triton, which
    # torch itself does, for its flop counter.
    for test in tests:
        chosen = {"TRITON_INTERPRET": "1"} if "kernels" in test else {}
        run_pytest(
            session, test, *session.posargs, env={"HP_INDUCTOR": "1", "HP_WHOLE": "1", **chosen}
        )


@nox.session(default=False)
def cubins(session: nox.Session) -> None:
    """Compile all Triton kernels for GPUs that need not be there; `-- --write` records limits."""
    install(session, *map(with_extras, PACKAGES), group="test-triton")
    session.run("python", "-m", "integration_tests.acceptance.cubins", *session.posargs)
    run_pytest(session, "integration_tests/acceptance/test_cubins.py")


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """Test packages on real models of Hugging Face's transformers, and in accelerate's loop."""
    install(session, *map(with_extras, TRANSFORMERS_TESTS), group="test-transformers")
    tests = files_of("integration_tests", ["models/test_transformers_*.py"])
    for name, pattern in TRANSFORMERS_TESTS.items():
        tests += files_of(f"packages/{name}/tests", [pattern])
    run_pytest(session, *tests, *session.posargs)


@nox.session(default=False, python=["3.11", "3.12"])
def libraries(session: nox.Session) -> None:
    """Verify jobs of accelerate, DeepSpeed, Megatron, torchtitan, transformers and TRL.

    On each of two Pythons, which have other versions of these.
    """
    pins = ROOT / "integration_tests" / "jobs" / "libraries" / "constraints.txt"
    install(session, "hp-train[packing]", group="test-transformers", others=LIBRARIES, pins=pins)
    # Where DeepSpeed builds its operator for sums in shared memory, with a C++ compiler.
    env = {"TORCH_EXTENSIONS_DIR": str(SCRATCH / "torch-extensions")}
    run_pytest(session, LIBRARIES_TEST, *session.posargs, env=env)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Run the zoo, and all causal models in transformers' own layouts; it goes on."""
    install(session, "hp-train[packing]", group="test-transformers")
    kept = ("--results", str(SCRATCH / "demo"), "--output", str(SCRATCH / "demo.html"))
    session.run("python", "-m", "integration_tests.jobs.demo", "--all", *kept, *session.posargs)


@nox.session(default=False)
def search(session: nox.Session) -> None:
    """Run features of released libraries beside one process, by the hundred; it goes on.

    `-- FAMILY --only REGEX` tries some again; `-- --table docs/found/table.md` writes the page.
    """
    pins = ROOT / "integration_tests" / "jobs" / "libraries" / "constraints.txt"
    install(
        session,
        "hp-train[packing]",
        group="test-transformers",
        others=LIBRARIES,
        pins=pins,
    )
    kept = ("--results", str(SCRATCH / "search"))
    # Where DeepSpeed builds its operator for sums in shared memory, with a C++ compiler.
    env = {"TORCH_EXTENSIONS_DIR": str(SCRATCH / "torch-extensions")}
    command = ("python", "-m", "integration_tests.jobs.search")
    session.run(*command, *kept, *session.posargs, env=env)


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """Compare 453 clean jobs of many styles with one process, and seeded bugs; it goes on."""
    install(session, "hp-train[packing]", group="test-transformers")
    kept = ("--bugs", "--results", str(SCRATCH / "clean"))
    session.run("python", "-m", "integration_tests.jobs.clean", *kept, *session.posargs)


@nox.session(default=False)
def reports(session: nox.Session) -> None:
    """Run jobs of public reports in the releases before and after each fix; it goes on.

    An environment at a time is made beside .nox/reports and removed. `-- --only NAME --again` runs
    some anew; `-- --table docs/reference/tables/public-reports.md` writes the page.
    """
    install(session, "hp-verify", group="sessions")
    command = ("python", "-m", "integration_tests.jobs.reports")
    kept = ("--results", str(SCRATCH / "reports"))
    session.run(*command, *kept, *session.posargs, env={"PYTHONPATH": str(ROOT / "tools")})


@nox.session(default=False)
def folders(session: nox.Session) -> None:
    """Read 200 mutants of folders of models as transformers does, or refuse; it goes on."""
    install(session, "hp-train[packing]", group="test-transformers")
    given = session.posargs or ("200", "0")
    kept = ("--results", str(SCRATCH / "folders.jsonl"))
    session.run("python", "-m", "integration_tests.reliability.folders", *given, *kept)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Compare all causal models of transformers in our layouts with one process; it goes on."""
    install(session, "hp-train[packing]", group="test-transformers")
    limit = ("--minutes", "150", "--results", str(SCRATCH / "models"))
    session.run("python", "-m", "integration_tests.models.architectures", *limit, *session.posargs)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build every package into dist/ twice, check the files, install each by itself.

    `-- --no-install` leaves out the last part.
    """
    install(session, group="build")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "tools/build_distributions.py", str(dist))
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", "tools/check_distributions.py", str(dist))
    if "--no-install" not in session.posargs:
        session.run("python", "tools/install_distributions.py", str(dist))


@nox.session(default=False)
def golden(session: nox.Session) -> None:
    """Write checkpoints of every format, to be loaded by all later releases (RELEASING.md)."""
    install(session, "hp-train[packing]", group="test-torch")
    session.run("python", "-m", "integration_tests.reliability.golden", *session.posargs)


def _test_with_torch(session: nox.Session, torch: str) -> None:
    """Test every package against one release of torch, where this machine can hold it."""
    if session.venv_backend != "uv":
        session.skip("needs uv")
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < CUDA_BUILD_GIB:
        session.skip(f"free disk ({free:.0f} GiB) must be at least {CUDA_BUILD_GIB} GiB")
    install(session, *map(with_extras, PACKAGES), group="test-torch", torch=torch)
    session.run("python", "tools/private_torch_symbols.py", "--installed")
    failed = []
    for name in PACKAGES:  # one by one, as their own sessions test them
        try:
            run_pytest(session, f"packages/{name}/tests", *session.posargs)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"tests failed of {', '.join(failed)}")


@nox.session(name="compat-torch-lowest", tags=["compat"], default=False)
def compat_torch_lowest(session: nox.Session) -> None:
    """Test every package against the lowest torch that hp-platform declares."""
    [lowest] = [s.version for s in Requirement(TORCH).specifier if s.operator == ">="]
    _test_with_torch(session, f"torch=={lowest}")


@nox.session(name="compat-torch-newest", tags=["compat"], default=False)
def compat_torch_newest(session: nox.Session) -> None:
    """Test every package against the newest torch that the registry has in the declared range."""
    session.env.update(environment(TORCH))
    arguments = ["pip", "install", "--dry-run", "--no-deps", "--reinstall", TORCH]
    planned = session.run("uv", *arguments, silent=True, external=True)
    newest = re.search(r"torch==\S+", str(planned))
    if newest is None:
        session.error(f"no torch in what uv would install: {planned}")
    _test_with_torch(session, newest.group())


def _tests_with_lowest_siblings(requirement: str) -> Callable[[nox.Session], None]:
    package = Requirement(requirement).name

    def session_function(session: nox.Session) -> None:
        install(session, group="test-torch")
        arguments = ["tools/lowest_siblings.py", requirement, "--into", str(SCRATCH / "siblings")]
        found = str(session.run_install("python", *arguments, silent=True) or "")
        session.log(found)
        directories = [f"packages/{requirement}", *(s.split()[-1] for s in found.splitlines())]
        editable = [argument for directory in directories for argument in ("-e", directory)]
        session.install("--no-compile", *editable)
        run_pytest(session, f"packages/{package}/tests", *session.posargs)

    session_function.__doc__ = f"Test {requirement} against the lowest siblings it allows."
    return session_function


for _name in PACKAGES:
    if len(local_closure(with_extras(_name))) > 1:
        nox.session(name=f"compat-siblings-{_name}", tags=["compat"], default=False)(
            _tests_with_lowest_siblings(with_extras(_name))
        )


@nox.session(default=False)
def versions(session: nox.Session) -> None:
    """Test every package on Python 3.11 to 3.14, with torches from the lowest to the highest.

    It goes on where it was stopped; `-- --python 3.14 hp-verify` tests a part, and runs its demo.
    An environment at a time is made beside .nox/versions.jsonl and removed. Take that file away to
    begin anew.
    """
    install(session, group="sessions")
    kept = ("--results", str(SCRATCH / "versions.jsonl"))
    session.run("python", "tools/versions.py", *kept, *session.posargs)


@nox.session(venv_backend="none", default=False)
def compat(session: nox.Session) -> None:
    """Queue every compat-* session: lowest and newest torch, lowest siblings."""
    session.notify("compat-torch-lowest")
    session.notify("compat-torch-newest")
    for name in PACKAGES:
        if len(local_closure(with_extras(name))) > 1:
            session.notify(f"compat-siblings-{name}")
