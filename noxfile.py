"""Sessions: one per package, then the checks that span packages.

    nox                          # everything that must pass, three sessions side by side
    nox -s train                 # train the quickstart model
    nox -s tests-hp-schedule     # one package, with only what it declares installed
    nox -R -s tests-hp-expert -- -k permute    # again, nothing reinstalled

Everything comes at the version that constraints.txt pins. Two variables name another torch:

    HP_TORCH        a requirement ("torch==2.11.0"), or the path or URL of a wheel; replaces the pin
    HP_TORCH_INDEX  the URL of an index, or a directory of wheels, to look in as well
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from session_times import recorded, summarize

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
# Sessions that are named print as they go. Each waits now and then, for ranks and time-outs, so
# there is one more than the two cores that they are meant for.
nox.options.parallel = 3 if len(sys.argv) == 1 else 1

ROOT = Path(__file__).resolve().parent
SCRATCH = ROOT / ".nox"
TIMES = SCRATCH / "times"
BYTECODE = SCRATCH / "bytecode"
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")


def _projects() -> dict[str, dict[str, Any]]:
    """Return the [project] table of every package, by distribution name."""
    files = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {table["name"]: table for table in (nox.project.load_toml(f)["project"] for f in files)}


PACKAGES = _projects()


def _torch_requirement() -> str:
    """Return HP_TORCH as a requirement; a wheel becomes a direct reference."""
    named = os.environ.get("HP_TORCH", "")
    if named.endswith(".whl") and "://" not in named:
        return f"torch @ {Path(named).resolve().as_uri()}"
    return f"torch @ {named}" if "://" in named and "@" not in named else named


def _constraints(torch: str, pins: Path | None = None) -> str:
    """Return the path of the pins, in which `torch` and other pins, if given, take their places."""
    pinned = ROOT / "constraints.txt"
    if not torch and pins is None:
        return str(pinned)
    # Each torch has a range of setuptools of its own.
    dropped = ["torch=", "setuptools="] if torch else []
    own = [] if pins is None else [pin for pin in pins.read_text().splitlines() if "==" in pin]
    dropped += [f"{pin.partition('==')[0]}=" for pin in own]
    lines = pinned.read_text().splitlines()
    others = [line for line in lines if not line.startswith(tuple(dropped))]
    named = f"{torch}{pins.parent.name if pins is not None else ''}"
    replaced = SCRATCH / f"constraints-{re.sub(r'[^0-9A-Za-z.]+', '-', named)}.txt"
    replaced.parent.mkdir(exist_ok=True)
    replaced.write_text("\n".join([*others, *own, torch, ""]))
    return str(replaced)


def _environment(torch: str = "", pins: Path | None = None) -> dict[str, str]:
    """Return what makes pip and uv resolve alike: the pins and the places to look in."""
    constraints = _constraints(torch or _torch_requirement(), pins)
    env = {"PIP_CONSTRAINT": constraints, "UV_CONSTRAINT": constraints}
    env |= {"PIP_BUILD_CONSTRAINT": constraints, "UV_BUILD_CONSTRAINT": constraints}
    # Where it is set, every process would compile torch's sources again: twice the time of import.
    env["PYTHONDONTWRITEBYTECODE"] = ""
    env["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    # uv reads none of pip's variables, and separates places with commas where pip uses spaces.
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    index = os.environ.get("HP_TORCH_INDEX", "")
    if index and "://" not in index:
        links.append(str(Path(index).resolve()))
    elif index:
        env |= {"UV_INDEX": index, "UV_INDEX_STRATEGY": "unsafe-best-match"}
        env["PIP_EXTRA_INDEX_URL"] = f"{os.environ.get('PIP_EXTRA_INDEX_URL', '')} {index}".strip()
    if links:
        env["PIP_FIND_LINKS"] = " ".join(links)
        env["UV_FIND_LINKS"] = ",".join(filter(None, [os.environ.get("UV_FIND_LINKS"), *links]))
    return env


def _local_closure(*names: str) -> dict[str, set[str]]:
    """Return the packages of this repository that `names` need and are, with their extras."""
    closure: dict[str, set[str]] = {}
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        known = closure.get(requirement.name)
        if requirement.name not in PACKAGES or (known is not None and requirement.extras <= known):
            continue
        closure.setdefault(requirement.name, set()).update(requirement.extras)
        table = PACKAGES[requirement.name]
        pending += map(Requirement, table["dependencies"])
        for extra in requirement.extras:
            pending += map(Requirement, table["optional-dependencies"][extra])
    return closure


def _install(
    session: nox.Session,
    *names: str,
    group: str,
    torch: str = "",
    others: Sequence[str] = (),
    pins: Path | None = None,
) -> None:
    """Install packages of this repository as editable, one dependency group, and others.

    Siblings go into the same command: resolved on their own they would be looked up in a registry.
    """
    session.env.update(_environment(torch, pins))
    editable: list[str] = []
    for name, extras in sorted(_local_closure(*names).items()):
        suffix = f"[{','.join(sorted(extras))}]" if extras else ""
        editable += ["-e", f"packages/{name}{suffix}"]
    tools = nox.project.dependency_groups(PYPROJECT, group) if group else ()
    session.install("--no-compile", *editable, *tools, *others)
    _share_bytecode(session)


def _share_bytecode(session: nox.Session) -> None:
    """Let all environments have one cache of what is compiled from site-packages.

    Files that uv links are the same in each of them, and torch's take 6 s of CPU to compile.
    """
    for libraries in Path(session.virtualenv.location).glob("lib/python*/site-packages"):
        here = BYTECODE / libraries.absolute().relative_to("/")
        here.parent.mkdir(parents=True, exist_ok=True)
        shared = BYTECODE / libraries.parent.name
        shared.mkdir(exist_ok=True)
        if not here.exists():
            here.symlink_to(shared)


def _pytest(session: nox.Session, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pytest; what ranks and servers take, which outlive it, counts as of the session."""
    command = ("tools/reaping.py", "tools/forked.py", "-m", "pytest")
    session.run("python", *command, *arguments, env=env)


def _recorded(function: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """Let a session write down the seconds that it takes."""

    @functools.wraps(function)
    def with_record(session: nox.Session) -> None:
        with recorded(session.name, TIMES):
            function(session)

    return with_record


def _print_times(began: float) -> None:
    """Print a table of what the sessions took, those of other processes of this run included."""
    table = summarize(TIMES, since=began)
    if table:
        sys.stdout.write(f"{table}\n")


if os.environ.setdefault("HP_NOX", str(os.getpid())) == str(os.getpid()):
    atexit.register(_print_times, time.time())


def _with_extras(name: str) -> str:
    # Transformers is large: sessions that need it name its group.
    extras = {*PACKAGES[name].get("optional-dependencies", {})} - {"transformers"}
    return f"{name}[{','.join(sorted(extras))}]" if extras else name


def _sources() -> list[str]:
    return [f"packages/{name}/src" for name in PACKAGES]


@nox.session(allow_parallel=True)
@_recorded
def lint(session: nox.Session) -> None:
    """Check format, style, the layering of packages and the private torch symbols in use."""
    _install(session, group="lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(_sources())})
    session.run("python", "tools/private_torch_symbols.py")


@nox.session(allow_parallel=True)
@_recorded
def api(session: nox.Session) -> None:
    """Compare each package's public names with packages/*/api.txt; `-- --write` rewrites those."""
    _install(session, group="api")
    session.run("python", "tools/public_api.py", *session.posargs)


# Sessions that take long come first: what runs beside others at the end is short.
@nox.session(allow_parallel=True)
@_recorded
def integration(session: nox.Session) -> None:
    """Run the packages together, and examples and tools."""
    _install(session, "hp-train[packing]", group="test-torch")
    session.run("python", "tools/private_torch_symbols.py", "--installed")
    elsewhere = (*TEXT_TESTS, *_comparing_tests(), LIBRARIES_TEST)
    ignored = (f"--ignore={file}" for file in elsewhere)
    _pytest(session, "integration_tests", *ignored, *session.posargs)


@nox.session(allow_parallel=True)
@_recorded
def comparisons(session: nox.Session) -> None:
    """Run the tests of `hp verify` and `hp-verify`: what is equal, and mistakes that they find."""
    _install(session, "hp-train[packing]", group="test-torch")
    _pytest(session, *_comparing_tests(), *session.posargs)


WITHOUT_TORCH = ("hp-base",)


def _tests(requirement: str, *, only: str = "", without: str = "") -> Callable[[nox.Session], None]:
    """Return the session that tests one package with nothing installed but what it declares."""
    tests = f"packages/{Requirement(requirement).name}/tests"

    def session_function(session: nox.Session) -> None:
        has_torch = not without and requirement not in WITHOUT_TORCH
        _install(session, requirement, group="test-torch" if has_torch else "test")
        selected = [tests]
        if only or without:
            matched = sorted(str(f) for f in Path(tests).rglob(only or without))
            if not matched:
                session.error(f"no file in {tests} is named {only or without}")
            selected = matched if only else [tests, *(f"--ignore={f}" for f in matched)]
        _pytest(session, *selected, *session.posargs)

    session_function.__doc__ = f"Test {requirement} installed alone."
    return _recorded(session_function)


# hp-schedule plans without torch: only the tests of its runtime may need it.
RUNTIME_TESTS = "test_*runtime*.py"
LONGEST = ("hp-trainer", "hp-context", "hp-expert", "hp-train", "hp-dry", "hp-platform")
for _name in sorted(PACKAGES, key=lambda name: (*LONGEST, name).index(name)):
    _session = nox.session(name=f"tests-{_name}", tags=["tests"], allow_parallel=True)
    if _name == "hp-schedule":
        _session(_tests(_name, without=RUNTIME_TESTS))
        _session = nox.session(name=f"tests-{_name}-runtime", tags=["tests"], allow_parallel=True)
        _session(_tests(f"{_name}[runtime]", only=RUNTIME_TESTS))
    else:
        _session(_tests(_with_extras(_name)))


@nox.session(allow_parallel=True)
@_recorded
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    _install(session, *map(_with_extras, PACKAGES), group="docs")
    # -E: pages that an earlier build has read would keep their warnings to themselves.
    session.run("sphinx-build", "-W", "-n", "-E", "-q", "docs", "docs/_build/html")
    session.log("open docs/_build/html/index.html")


@nox.session(name="models-sample", allow_parallel=True)
@_recorded
def models_sample(session: nox.Session) -> None:
    """Run cells of the table of models, each also with a mistake; mutants; two round trips."""
    _install(session, "hp-train[packing]", group="test-transformers")
    table = "integration_tests/models/test_transformers_table.py"
    folders = "integration_tests/models/test_transformers_folders.py"
    trips = "integration_tests/models/test_transformers_round_trip.py::test_a_"
    family, model = (
        "family_comes_out_as_it_came_in",
        "model_of_transformers_comes_out_as_it_came_in",
    )
    some = () if session.posargs else (f"{trips}{family}[qwen3]", f"{trips}{model}[gpt2]")
    _pytest(session, table, folders, *some, *session.posargs)


def _comparing_tests() -> list[str]:
    """Return the half of the integration tests that is a session of its own."""
    names = ("jobs/**/test_*.py", "layouts/test_verify_*.py", "layouts/test_planned_steps.py")
    files = sorted(str(file) for name in names for file in Path("integration_tests").glob(name))
    return [file for file in files if file != LIBRARIES_TEST]


# What looks at files alone.
TEXT_TESTS = tuple(
    f"integration_tests/documents/test_{name}.py"
    for name in ("docs_errors", "docs_names", "docs_paths", "mutants", "pins")
)


@nox.session(allow_parallel=True)
@_recorded
def pages(session: nox.Session) -> None:
    """Check what pages say of files, sessions, errors and names, and the pins; without torch."""
    _install(session, group="test")
    _pytest(session, *TEXT_TESTS, *session.posargs)


@nox.session(allow_parallel=True)
@_recorded
def mypy(session: nox.Session) -> None:
    """Check the types of packages and all tests at once, then of tools, benchmarks and sessions."""
    _install(session, *map(_with_extras, PACKAGES), group="type")
    # Packages and tests know each other by other names than those of scripts, so these come apart.
    tests = map(str, sorted(ROOT.glob("packages/*/tests")))
    session.run("mypy", *_sources(), *tests, "integration_tests")
    pages = map(str, sorted(Path("docs").glob("*.py")))  # and nothing of what was built there
    session.run("mypy", "noxfile.py", "conftest.py", "tools", "benchmarks", *pages)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Write constraints.txt anew: `nox -s lock -- --upgrade-package ruff`, or only what is new."""
    _install(session, group="sessions")
    # What the pins are to be is not bound by what they were.
    unbound = {"UV_CONSTRAINT": None, "UV_BUILD_CONSTRAINT": None}
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
    _install(session, "hp-train", group="")
    session.run("hp", "train", *session.posargs)


@nox.session(default=False)
def verify(session: nox.Session) -> None:
    """Compare every pair of a feature and a setting, then 150 layouts over 20 steps.

    The pairs go on where they were stopped; `-- pairs` compares these alone, `-- pairs --part 1/4`
    a part of them. `-- --steps 2` and other options are for the layouts alone.
    """
    _install(session, "hp-train[packing]", group="")
    text = Path(session.create_tmp()) / "documents.jsonl"
    documents = [f"{i}, squared {i * i}. "[: 3 + i % 19] * (1 + i % 29 // 28) for i in range(3000)]
    text.write_text("".join(f'{{"text": "{each}"}}\n' for each in documents))
    only_pairs = session.posargs[:1] == ["pairs"]
    if only_pairs or not session.posargs:
        kept = ("--results", str(SCRATCH / "verify-pairs.jsonl"), "--data", str(text))
        model, more = "integration_tests/layouts/pairs.toml", session.posargs[1:]
        session.run("hp", "verify", model, "--generate", "pairs", *kept, *more)
    if not only_pairs:
        defaults = ("--generate", "150", "--steps", "20", "--data", str(text))
        model = "integration_tests/verify.toml"
        session.run("hp", "verify", model, *defaults, *session.posargs)


@nox.session(default=False)
def dryrun(session: nox.Session) -> None:
    """Dry runs of all configs on 8, 64 and 256 GPUs; their memory against real runs on the CPU.

    It goes on where it was stopped; `-- --part 1/2` is half of the dry runs alone.
    """
    _install(session, "hp-train[packing]", group="test-torch")
    if not session.posargs:
        memory = "integration_tests/layouts/test_dry_memory.py"
        _pytest(session, memory, env={"HP_WHOLE": "1"})
    results = str(SCRATCH / "dry-runs.jsonl")
    session.run("python", "tools/dry_runs.py", "--results", results, *session.posargs)


@nox.session(default=False)
def reliability(session: nox.Session) -> None:
    """Kill ranks, damage checkpoints, fuzz configs, reload in 60 layouts; hostile checkpoints."""
    _install(session, "hp-train[packing]", group="test-torch")
    session.run("python", "-m", "integration_tests.reliability", *session.posargs)
    if not session.posargs:
        names = ("checkpoint_hostile", "checkpoint_background", "checkpoint_faults", "dcp")
        tests = [f"packages/hp-train/tests/test_train_{name}.py" for name in names]
        _pytest(session, *tests)
        nodes = "integration_tests/reliability/test_torchrun_restarts.py"
        _pytest(session, nodes, env={"HP_SLOW_RESTARTS": "1"})


@nox.session(default=False)
def rules(session: nox.Session) -> None:
    """Start 2,000 drawn configs that rules accept, and of each rule some that it alone refuses.

    An hour at most; it goes on where it was stopped. `-- --minutes 10` is a shorter part. Take away
    .nox/rules to begin anew.
    """
    _install(session, "hp-train[packing]", group="test-torch")
    kept = ("--results", str(SCRATCH / "rules"))
    session.run("python", "-m", "integration_tests.reliability.accepted", *kept, *session.posargs)


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Change valid schedules 20,000 times; validation must refuse exactly what does not run."""
    _install(session, "hp-schedule", group="test")
    tests = "packages/hp-schedule/tests/test_schedule_mutations.py"
    env = {"HP_SCHEDULE_MUTANTS": "20000", "HP_SCHEDULE_EXHAUSTIVE": "1"}
    _pytest(session, "-s", tests, *session.posargs, env=env)


@nox.session(default=False)
def exact(session: nox.Session) -> None:
    """Search schedules against CP-SAT: 5,000 results and all bounds, optima, windows; no torch."""
    _install(session, "hp-schedule[exact]", group="test")
    names = ("exact", "orders", "search", "bounds")
    tests = (f"packages/hp-schedule/tests/test_schedule_{name}.py" for name in names)
    _pytest(session, "-s", *tests, env={"HP_SCHEDULE_BOUNDS": "1000"})


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Make small wrong changes, one by one: the tests of the default run must find 95 % of them.

    It goes on where it was stopped; `-- NAME` tries those changes alone. Take away .nox/mutants to
    begin anew. Commit first: it is the last commit that is changed.
    """
    _install(session, *map(_with_extras, PACKAGES), group="test-torch")
    session.run("python", "tools/mutants", "record")
    session.run("python", "tools/mutants", "run", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those named: `nox -s bench -- benchmarks/bench_ranks.py`."""
    found = sorted(str(f) for f in Path("benchmarks").glob("bench_*.py"))
    _install(session, "hp-train[packing]", group="test-transformers")
    for script in session.posargs or found:
        session.run("python", script)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the acceptance kit (docs/how-to/gpus.md), on the torch that HP_TORCH[_INDEX] names."""
    _install(session, *map(_with_extras, PACKAGES), group="test-transformers")
    session.run("python", "-m", "integration_tests.acceptance", *session.posargs)


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Test hp-expert's Triton kernels in Triton's interpreter, and blocks built by inductor."""
    _install(session, *map(_with_extras, PACKAGES), group="test-triton")
    interpreted = ("kernels", "fused_kernels")
    tests = [
        f"packages/hp-expert/tests/test_expert_{name}.py" for name in (*interpreted, "compile")
    ]
    tests.append("packages/hp-trainer/tests/test_trainer_compile.py")
    # Each in its own process: an interpreter must be chosen before anything imports Triton, which
    # torch itself does, for its flop counter.
    for test in tests:
        chosen = {"TRITON_INTERPRET": "1"} if "kernels" in test else {}
        _pytest(
            session, test, *session.posargs, env={"HP_INDUCTOR": "1", "HP_WHOLE": "1", **chosen}
        )


@nox.session(default=False)
def cubins(session: nox.Session) -> None:
    """Compile all Triton kernels for GPUs that need not be there; `-- --write` records limits."""
    _install(session, *map(_with_extras, PACKAGES), group="test-triton")
    session.run("python", "-m", "integration_tests.acceptance.cubins", *session.posargs)
    _pytest(session, "integration_tests/acceptance/test_cubins.py")


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """Test packages on real models of Hugging Face's transformers, and in accelerate's loop."""
    _install(session, *map(_with_extras, TRANSFORMERS_TESTS), group="test-transformers")
    _pytest(session, *_transformers_tests(), *session.posargs)


@nox.session(default=False)
def libraries(session: nox.Session) -> None:
    """Verify jobs of accelerate, DeepSpeed, Megatron, torchtitan and transformers, as they are."""
    pins = ROOT / "integration_tests" / "jobs" / "libraries" / "constraints.txt"
    _install(session, "hp-train[packing]", group="test-transformers", others=LIBRARIES, pins=pins)
    # Where DeepSpeed builds its operator for sums in shared memory, with a C++ compiler.
    env = {"TORCH_EXTENSIONS_DIR": str(SCRATCH / "torch-extensions")}
    _pytest(session, LIBRARIES_TEST, *session.posargs, env=env)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Run the zoo, and all causal models in transformers' own layouts; it goes on."""
    _install(session, "hp-train[packing]", group="test-transformers")
    kept = ("--results", str(SCRATCH / "demo"), "--output", str(SCRATCH / "demo.html"))
    session.run("python", "-m", "integration_tests.jobs.demo", "--all", *kept, *session.posargs)


@nox.session(default=False)
def folders(session: nox.Session) -> None:
    """Read 200 mutants of folders of models as transformers does, or refuse; it goes on."""
    _install(session, "hp-train[packing]", group="test-transformers")
    given = session.posargs or ("200", "0")
    kept = ("--results", str(SCRATCH / "folders.jsonl"))
    session.run("python", "-m", "integration_tests.reliability.folders", *given, *kept)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Compare all causal models of transformers in our layouts with one process; it goes on."""
    _install(session, "hp-train[packing]", group="test-transformers")
    limit = ("--minutes", "150", "--results", str(SCRATCH / "models"))
    session.run("python", "-m", "integration_tests.models.architectures", *limit, *session.posargs)


# Their versions are pinned in integration_tests/jobs/libraries, Triton's is that of test-triton.
LIBRARIES = ("deepspeed", "megatron-core", "torchtitan", "triton")
LIBRARIES_TEST = "integration_tests/jobs/test_verify_libraries.py"


# Of each package, the tests that need transformers; elsewhere they are skipped.
TRANSFORMERS_TESTS = {
    "hp-context": "test_context_transformers*.py",
    "hp-expert": "test_expert_transformers*.py",
    "hp-overlap": "test_overlap_transformers.py",
    "hp-schedule": "test_schedule_runtime_split_model.py",
    "hp-train": "test_train_transformers*.py",
    "hp-transformers": "test_transformers_model_*.py",
}


def _transformers_tests() -> list[str]:
    of_packages = [
        str(file)
        for name, pattern in TRANSFORMERS_TESTS.items()
        for file in sorted(Path(f"packages/{name}/tests").glob(pattern))
    ]
    return [
        *of_packages,
        *map(str, sorted(Path("integration_tests").glob("models/test_transformers_*.py"))),
    ]


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build every package into dist/, check the files, install each into an empty environment."""
    _install(session, group="build")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        project = f"packages/{name}"
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), project)
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", "tools/check_distributions.py", str(dist))
    session.run("python", "tools/install_distributions.py", str(dist))


def _test_with_torch(session: nox.Session, torch: str) -> None:
    """Test every package against one release of torch, where this machine can hold it."""
    if session.venv_backend != "uv":
        session.skip("needs uv")
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < CUDA_BUILD_GIB:
        session.skip(f"free disk ({free:.0f} GiB) must be at least {CUDA_BUILD_GIB} GiB")
    _install(session, *map(_with_extras, PACKAGES), group="test-torch", torch=torch)
    session.run("python", "tools/private_torch_symbols.py", "--installed")
    failed = []
    for name in PACKAGES:  # one by one, as their own sessions test them
        try:
            _pytest(session, f"packages/{name}/tests", *session.posargs)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"tests failed of {', '.join(failed)}")


# What the registry's build for Linux needs with its CUDA libraries: measured 4.5 GiB, plus uv's
# cache of the same where hard links are not possible.
CUDA_BUILD_GIB = 10
TORCH = next(r for r in PACKAGES["hp-platform"]["dependencies"] if r.startswith("torch"))


@nox.session(name="compat-torch-lowest", tags=["compat"], default=False)
def compat_torch_lowest(session: nox.Session) -> None:
    """Test every package against the lowest torch that hp-platform declares."""
    [lowest] = [s.version for s in Requirement(TORCH).specifier if s.operator == ">="]
    _test_with_torch(session, f"torch=={lowest}")


@nox.session(name="compat-torch-newest", tags=["compat"], default=False)
def compat_torch_newest(session: nox.Session) -> None:
    """Test every package against the newest torch that the registry has in the declared range."""
    session.env.update(_environment(TORCH))
    arguments = ["pip", "install", "--dry-run", "--no-deps", "--reinstall", TORCH]
    planned = session.run("uv", *arguments, silent=True, external=True)
    newest = re.search(r"torch==\S+", str(planned))
    if newest is None:
        session.error(f"no torch in what uv would install: {planned}")
    _test_with_torch(session, newest.group())


def _tests_with_lowest_siblings(requirement: str) -> Callable[[nox.Session], None]:
    package = Requirement(requirement).name

    def session_function(session: nox.Session) -> None:
        _install(session, group="test-torch")
        arguments = ["tools/lowest_siblings.py", requirement, "--into", str(SCRATCH / "siblings")]
        found = str(session.run_install("python", *arguments, silent=True) or "")
        session.log(found)
        directories = [f"packages/{requirement}", *(s.split()[-1] for s in found.splitlines())]
        editable = [argument for directory in directories for argument in ("-e", directory)]
        session.install("--no-compile", *editable)
        _pytest(session, f"packages/{package}/tests", *session.posargs)

    session_function.__doc__ = f"Test {requirement} against the lowest siblings it allows."
    return session_function


for _name in PACKAGES:
    if len(_local_closure(_with_extras(_name))) > 1:
        nox.session(name=f"compat-siblings-{_name}", tags=["compat"], default=False)(
            _tests_with_lowest_siblings(_with_extras(_name))
        )


@nox.session(venv_backend="none", default=False)
def compat(session: nox.Session) -> None:
    """Queue every compat-* session: lowest and newest torch, lowest siblings."""
    session.notify("compat-torch-lowest")
    session.notify("compat-torch-newest")
    for name in PACKAGES:
        if len(_local_closure(_with_extras(name))) > 1:
            session.notify(f"compat-siblings-{name}")
