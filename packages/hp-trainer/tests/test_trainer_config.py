import random
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import tomli_w
from train_refusals import refusal

from hp_base.environment import World, external_world, slurm_rendezvous, speaks_for_node
from hp_base.errors import ConfigError
from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import (
    build,
    for_saving,
    resolve,
    shipped,
    to_json,
    to_lines,
    to_toml,
)
from hp_trainer.config.schema import fields


def test_every_key_has_help_and_a_default_that_is_within_its_bounds() -> None:
    for field in fields().values():
        assert field.help.endswith((".", ".)"))
        assert msgspec.convert(field.default, field.annotation) == field.default


def test_the_quickstart_runs_four_processes_with_pipeline_and_experts_split() -> None:
    config = resolve(env={}).config
    assert config.world_size == 4
    assert (config.mesh.pp, config.mesh.ep) == (2, 2)
    assert (config.pipeline.schedule, config.pipeline.stages_per_rank) == ("interleaved_1f1b", 2)


def test_shipped_configs_are_good() -> None:
    assert "quickstart" in shipped()
    for name in shipped():
        assert resolve(name, env={}).name == name


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('# a comment\n[train]\nsteps = 7\n\nlearning_rate = 1e-2\n"log_every" = 3\n')
    resolved = resolve(str(path), [("train.steps", "1_000")], env={})
    train = resolved.config.train
    assert (train.steps, train.learning_rate, train.log_every) == (1000, 0.01, 3)
    assert resolved.origins["train.steps"] == "command line"
    assert resolved.origins["train.learning_rate"] == f"{path}:5"
    assert resolved.origins["train.log_every"] == f"{path}:6"
    assert resolved.origins["train.beta1"] == "default"


def test_whole_numbers_serve_as_fractions_but_not_the_other_way(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[train]\nlearning_rate = 1\n")
    assert resolve(str(path), env={}).config.train.learning_rate == 1.0
    message = refusal(text="[train]\nsteps = 10.0\n", tmp=tmp_path)
    assert message.endswith("my.toml:2: train.steps (10.0) must be an integer")


def test_a_list_is_one_path_or_a_toml_array(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.touch()
    b.touch()
    one = resolve(None, [("data.paths", str(a))], env={}).config
    two = resolve(None, [("data.paths", f'["{a}", "{b}"]')], env={}).config
    assert one.data.paths == (str(a),)
    assert two.data.paths == (str(a), str(b))


@pytest.mark.parametrize("render", ["toml", "bare", "lines"])
def test_what_is_printed_is_the_same_config_again(render: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    overrides = [("train.sample_prompt", 'x = "\n\t\\'), ("data.paths", [str(tmp_path / "corpus")])]
    resolved = resolve(None, overrides, env={})
    text = {
        "toml": to_toml(resolved.config, resolved.origins),
        "bare": to_toml(resolved.config),
        "lines": to_lines(resolved),
    }[render]
    path = tmp_path / "printed.toml"
    path.write_text(text)
    assert resolve(str(path), env={}).config == resolved.config


def test_json_holds_values_and_origins() -> None:
    content = msgspec.json.decode(to_json(resolve(None, [("train.steps", "9")], env={})))
    assert content["config"]["train"]["steps"] == 9
    assert content["origins"]["train.steps"] == "command line"


def test_a_saved_config_can_be_read_from_any_folder(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "4"}
    resolved = resolve(None, [("data.paths", str(tmp_path))], env=env)
    assert resolved.config.launch.num_processes == 4
    assert resolved.origins["launch.num_processes"] == "WORLD_SIZE"
    saved = for_saving(resolved)
    assert saved.launch.num_processes == 0
    assert Path(saved.run.output_dir).is_absolute()
    assert saved.data.paths == (str(tmp_path),)


def test_a_resumed_run_takes_its_own_config(tmp_path: Path) -> None:
    run_dir = tmp_path / "old"
    run_dir.mkdir()
    first = resolve(None, [("train.steps", "77"), ("run.seed", "5")], env={})
    (run_dir / "config.toml").write_text(to_toml(for_saving(first)))
    overrides = [("run.resume", str(run_dir)), ("train.steps", "99")]
    config = resolve(None, overrides, env={}).config
    assert (config.train.steps, config.run.seed) == (99, 5)
    assert config.run.resume == str(run_dir)
    with pytest.raises(ConfigError, match="must be left out where a run is resumed"):
        resolve("quickstart", overrides, env={})


def test_files_must_exist_and_near_names_are_offered(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    wrong = tmp_path / "korpus.txt"
    assert refusal(("data.paths", str(wrong))) == (
        f'data.paths ("{wrong}") must exist; did you mean corpus.txt?'
    )
    assert refusal(("data.tokenizer", str(tmp_path))) == (
        f'data.tokenizer ("{tmp_path}") must be a file, or a folder with a tokenizer.json'
    )
    assert "run.resume" in refusal(("run.resume", str(tmp_path)))
    assert "must be a run directory" in refusal(("run.resume", str(tmp_path)))


def test_the_output_folder_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    message = refusal(("run.output_dir", str(file / "runs")))
    assert message.startswith(f'run.output_dir ("{file}/runs") must be a writable folder')
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "is not writable" in refusal(("run.output_dir", str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train\n", "must be TOML"),
        ("[train]\nsteps = 1\nsteps = 2\n", "must be TOML"),
        ("[trian]\n", ":1: unknown key trian; did you mean train?"),
        ("[train]\n\nstepz = 2\n", ":3: unknown key train.stepz; did you mean train.steps?"),
        ("steps = 2\n", ":1: unknown key steps"),
        ("train = 5\n", ":1: train (5) must be a table, [train]"),
        ("[[train]]\nsteps = 3\n", "must be a table"),
        ("[train]\nsteps = [1]\n", ":2: train.steps ([1]) must be an integer"),
        ("[train]\nsteps = {a = 1}\n", ":2: train.steps (a table) must be an integer"),
        ("[train]\nsteps = 1979-05-27\n", ":2: train.steps (1979-05-27) must be an integer"),
        ('[data]\npaths = "x"\n', ':2: data.paths ("x") must be a list of strings'),
        ("[train]\nsteps = true\n", ":2: train.steps (true) must be an integer"),
    ],
)
def test_a_bad_file_is_named_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(text=text, tmp=tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for source, expected in (
        ("quikstart", "did you mean quickstart?"),
        ("missing.toml", "No such file"),
        (str(tmp_path), "it is no regular file"),
        (str(binary), "must be UTF-8"),
        ("a\0b/c", "must be a readable file"),
    ):
        with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
            resolve(source, env={})


def test_a_key_is_given_once_on_the_command_line() -> None:
    assert "must be given once" in refusal(("train.steps", "1"), ("train.steps", "2"))


def test_the_mesh_must_fit_the_processes_that_others_started() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, env={"RANK": "1", "WORLD_SIZE": "2"})
    assert str(caught.value) == (
        "mesh.pp (2) x mesh.dp_replicate (2) = 4 must equal WORLD_SIZE (2); "
        "nearest: mesh.dp_replicate = 1"
        "; where no torchrun has started this process: unset RANK WORLD_SIZE"
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
    with pytest.raises(ConfigError, match=r"must equal SLURM_NTASKS \(8\)"):
        resolve(None, env=slurm)


def test_a_slurm_batch_script_starts_its_own_processes() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert external_world(batch) is None
    assert external_world(batch | {"SLURM_STEP_ID": "4294967291"}) is None
    assert external_world(batch | {"SLURM_STEP_ID": "3"}) == World("SLURM_NTASKS", 8)
    shell = batch | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}  # `srun --pty bash`
    assert external_world(shell) is None


def test_variables_that_another_job_has_left_silence_nobody() -> None:
    assert speaks_for_node({"LOCAL_RANK": "3"})
    assert speaks_for_node({"SLURM_LOCALID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "2"})
    started = {"RANK": "3", "WORLD_SIZE": "8"}
    assert not speaks_for_node(started | {"LOCAL_RANK": "3"})
    assert speaks_for_node(started | {"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "unset RANK WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "unset RANK WORLD_SIZE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}, "unset SLURM_PROCID"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "x", "SLURM_STEP_ID": "0"}, "unset SLURM_PROCID"),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_what_to_do(
    given: dict[str, str], hint: str
) -> None:
    with pytest.raises(ConfigError, match=f"; where no .* has started this process: {hint}$"):
        resolve("quickstart", env=given)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n[07-12,20]", "n07"),
        ("a-1,b-2", "a-1"),
        ("gpu-[3],x", "gpu-3"),
        ("", "localhost"),
    ],
)
def test_slurm_ranks_meet_on_the_first_node(nodes: str, host: str) -> None:
    assert slurm_rendezvous({"SLURM_JOB_NODELIST": nodes})["MASTER_ADDR"] == host
    assert "MASTER_ADDR" not in slurm_rendezvous({"MASTER_ADDR": "x"})


def test_build_makes_a_config_of_given_keys() -> None:
    assert build({"train.steps": 3}).train.steps == 3
    assert build({}) == Config()


_JUNK: list[object] = [
    -1, 0, 1, 3, 2**31, 10**30, -0.5, 0.5, 1.0, float("inf"), float("nan"), "", "x",
    "\n\x00", "a" * 5000, "\N{SNOWMAN}", True, [], ["x"], [1], [[]],
    {"a": 1}, {}, "1f1b", "../..", "/", "~",
]  # fmt: skip


def _answer(source: str | None, overrides: Sequence[tuple[str, object]]) -> str:
    """Why a config is refused; empty if it is not."""
    try:
        resolve(source, overrides, env={})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(8))
def test_mutated_configs_are_accepted_or_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    refused = 0
    for number in range(40):
        tables = to_dict(resolve(env={}).config)
        tables["run"]["output_dir"] = str(tmp_path)
        for _ in range(rng.randint(1, 3)):
            section = rng.choice(list(tables))
            key = rng.choice([*tables[section], "stepz"])
            kind = rng.randrange(4)
            if kind == 0:
                tables[section][key + rng.choice(["", "_", "s"])] = rng.choice(_JUNK)
            elif kind == 1:
                tables[section].pop(key, None)
            elif kind == 2 and isinstance(tables[section].get(key), int):
                tables[section][key] = rng.choice([-1, 0, 1, 3, 5, 7, 64, 2**40])
            else:
                tables[section][key] = rng.choice(_JUNK)
        text = tomli_w.dumps(tables)
        if rng.random() < 0.2:
            cut = rng.randrange(len(text))
            text = text[:cut] + rng.choice(["", "[", "=", '"', "\0", "\n[", "é"]) + text[cut + 1 :]
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        message = _answer(str(path), ())
        assert message.isprintable()
        assert len(message) < 400 + len(str(tmp_path))
        refused += bool(message)
    assert refused > 10


@pytest.mark.parametrize("seed", range(4))
def test_mutated_command_lines_are_accepted_or_refused_in_one_line(seed: int) -> None:
    rng = random.Random(seed)
    keys = [*fields(), "train", "x.y", "train.", ".steps", "train.stepz", "mesh.tp"]
    for _ in range(60):
        values = (str(rng.choice(_JUNK)), str(rng.randint(-3, 12)), "[", '["', "1e400")
        overrides = [(rng.choice(keys), rng.choice(values)) for _ in range(rng.randint(1, 3))]
        assert _answer(None, overrides).isprintable()


def test_toml_itself_agrees_that_the_printed_config_is_toml() -> None:
    expected = to_dict(Config())
    assert expected["run"].pop("resume") == ""  # which, given, would be refused
    assert tomllib.loads(to_toml(Config())) == expected


def test_the_documentation_lists_every_key_with_its_default() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "config.md"
    if not page.exists():
        pytest.skip("not in a checkout")
    rows = {line.split("`")[1]: line for line in page.read_text().splitlines() if "| `" in line}
    for field in fields().values():
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        value = tomli_w.dumps({"value": default}).removeprefix("value = ").strip()
        assert rows[field.key].endswith(f"| `{value}` | {field.help} |")


@pytest.mark.parametrize(
    ("key", "extra"), [("run.tensorboard", "tensorboard"), ("data.tokenizer", "tokenizers")]
)
def test_a_missing_extra_is_named_with_what_installs_it(
    key: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    file = tmp_path / "tokenizer.json"
    file.touch()
    value = str(file) if key == "data.tokenizer" else "true"
    expected = f"{key} needs the extra {extra}: pip install 'hp-train[{extra}]'"
    assert refusal((key, value)) == expected


def test_a_byte_order_mark_before_a_config_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert resolve(str(path)).config.train.steps == 7


def test_a_folder_with_a_tokenizer_is_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_text("{}")
    assert resolve(None, [("data.tokenizer", str(folder))]).config.data.tokenizer == str(path)
    with pytest.raises(ConfigError, match=r"must be a file, or a folder with a tokenizer\.json"):
        resolve(None, [("data.tokenizer", str(tmp_path))])
    with pytest.raises(ConfigError, match=r"data\.separator .*needs data\.tokenizer"):
        resolve(None, [("data.separator", "x")])
