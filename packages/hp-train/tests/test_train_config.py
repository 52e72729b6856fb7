import random
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import tomli_w

from hp_train.base.environment import World, external_world, slurm_rendezvous
from hp_train.config import Config, to_dict
from hp_train.config.options import build, for_saving, resolve, shipped
from hp_train.config.render import to_json, to_lines, to_toml
from hp_train.config.schema import fields
from hp_train.errors import ConfigError


def refusal(
    *overrides: tuple[str, object], text: str | None = None, tmp: Path | None = None
) -> str:
    source = None
    if text is not None:
        assert tmp is not None
        path = tmp / "my.toml"
        path.write_text(text)
        source = str(path)
    with pytest.raises(ConfigError) as caught:
        resolve(source, overrides, env={})
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "train.steps (0) must be at least 1"),
        ("train.steps=many", "train.steps (many) must be an integer"),
        ("train.steps=", "train.steps () must be an integer"),
        ("train.learning_rate=nan", "train.learning_rate (nan) must be at least 0"),
        ("train.learning_rate=inf", "train.learning_rate (inf) must be a finite number"),
        ("model.dropout=1", "model.dropout (1) must be less than 1"),
        ("model.tie_embeddings=maybe", "model.tie_embeddings (maybe) must be true or false"),
        (
            "pipeline.schedule=1f2b",
            (
                'pipeline.schedule ("1f2b") must be one of gpipe, 1f1b, looped_bfs, '
                "interleaved_1f1b, zero_bubble, interleaved_zero_bubble, zbv, v_half, v_min, "
                "dualpipe_v, u_shape; did you mean 1f1b?"
            ),
        ),
        ("run.name=../x", 'run.name ("../x") must be letters, digits and _ . + - only'),
        ("data.paths=[1]", "data.paths ([1]) must be a list of strings"),
        (
            "mesh.stage_tp=[0,1]",
            "mesh.stage_tp ([0, 1]) must be a list of integers, each at least 1",
        ),
        (
            "mesh.stage_tp=two",
            'mesh.stage_tp (["two"]) must be a list of integers, each at least 1',
        ),
        (
            "mesh.stage_tp=[1,2,1]",
            ("mesh.stage_tp ([1, 2, 1]) must have a size for each of mesh.pp (2) pipeline ranks"),
        ),
        (
            "mesh.stage_ep=[1,2]",
            "mesh.ep (2) must be 1 with mesh.stage_ep ([1, 2])",
        ),
        ("train.step=1", "unknown key train.step; did you mean train.steps?"),
        ("trian.steps=1", "unknown key trian.steps; did you mean train.steps?"),
        ("train.dim=1", "unknown key train.dim; did you mean model.dim?"),
        (
            "launch.num_processes=3",
            (
                "mesh.pp (2) x mesh.dp_replicate (2) = 4 must equal launch.num_processes (3); "
                "nearest: mesh.pp = 1 or 3"
            ),
        ),
        ("mesh.ep=3", "mesh.ep (3) must divide mesh.dp_replicate (2); nearest: 2"),
        ("model.num_experts=7", "mesh.ep (2) must divide model.num_experts (7); nearest: 1 or 7"),
        (
            "model.num_layers=3",
            "model.num_layers (3) must be at least mesh.pp (2) x pipeline.stages_per_rank (2) = 4",
        ),
        (
            "pipeline.schedule=1f1b",
            'pipeline.stages_per_rank (2) must be 1 with pipeline.schedule ("1f1b")',
        ),
        (
            "train.global_batch_size=30",
            (
                "train.global_batch_size (30) must be a multiple of mesh.dp_replicate (2) x "
                "train.microbatch_size (4) = 8; nearest: 24 or 32"
            ),
        ),
        (
            "model.num_kv_heads=3",
            "model.num_kv_heads (3) must divide model.num_heads (4); nearest: 2 or 4",
        ),
        ("model.head_dim=31", "model.head_dim (31) must be even"),
        (
            "model.dim=130",
            (
                "model.dim (130) must be a multiple of 2 x model.num_heads (4) "
                "where model.head_dim is 0; nearest: 128 or 136"
            ),
        ),
        ("model.top_k=9", "model.top_k (9) must be at most model.num_experts (8)"),
        (
            "model.num_dense_layers=5",
            "model.num_dense_layers (5) must be at most model.num_layers (4)",
        ),
        (
            "train.sample_prompt=",
            'train.sample_prompt ("") must not be empty with train.sample_tokens (200)',
        ),
        (
            "train.keep_every=70",
            "train.keep_every (70) must be a multiple of train.save_every (50); nearest: 50 or 100",
        ),
    ],
)
def test_a_bad_value_is_named_with_the_relation_it_breaks(override: str, message: str) -> None:
    key, _, value = override.partition("=")
    assert refusal((key, value)) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model.attention=mla model.qk_norm=true",
            'model.qk_norm (true) must be false with model.attention ("mla")',
        ),
        (
            "model.attention=mla model.qk_norm=false model.rope_head_dim=7",
            "model.rope_head_dim (7) must be even",
        ),
        (
            "model.full_attention_every=2",
            "model.full_attention_every (2) must be 0 with model.sliding_window (0)",
        ),
        (
            "model.rope_scaling=llama3 model.rope_low_factor=4",
            "model.rope_low_factor (4) must be less than model.rope_high_factor (4)",
        ),
        (
            "model.rope_scaling=yarn model.rope_beta_slow=40",
            "model.rope_beta_slow (40) must be less than model.rope_beta_fast (32)",
        ),
        (
            "model.rope_factor=8",
            'model.rope_factor (8) must be 1 with model.rope_scaling ("none")',
        ),
        (
            "model.num_expert_groups=3",
            "model.num_expert_groups (3) must divide model.num_experts (8); nearest: 2 or 4",
        ),
        (
            "model.num_limited_groups=2",
            "model.num_limited_groups (2) must be at most model.num_expert_groups (1)",
        ),
        (
            "model.num_expert_groups=4 model.top_k=3",
            "model.top_k (3) must be at most model.num_limited_groups (1) x 2 experts of a group",
        ),
        (
            "model.num_expert_groups=8 model.top_k=1",
            "model.num_expert_groups (8) must be at most model.num_experts (8) / 2",
        ),
        (
            "model.max_positions=100",
            "data.seq_len (128) must be at most model.max_positions (100)",
        ),
        (
            "model.num_mtp_modules=128",
            "model.num_mtp_modules (128) must be less than data.seq_len (128)",
        ),
        (
            "run.init_from=/nowhere",
            'run.init_from ("/nowhere") must be a folder with a config.json',
        ),
    ],
)
def test_settings_of_a_model_must_fit_each_other(overrides: str, message: str) -> None:
    pairs = [tuple(override.split("=")) for override in overrides.split()]
    assert refusal(*pairs) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "mesh.ep=1 mesh.stage_tp=[1,2] model.tie_embeddings=true",
            (
                "model.tie_embeddings (true) must be false with mesh.stage_tp ([1, 2]): the first "
                "size (1) must equal the last (2)"
            ),
        ),
        (
            "mesh.ep=1 mesh.stage_tp=[1,3]",
            "mesh.stage_tp (3) must divide model.num_heads (4); nearest: 2 or 4",
        ),
        ("mesh.tp=2 mesh.stage_tp=[1,2]", "mesh.tp (2) must be 1 with mesh.stage_tp ([1, 2])"),
        (
            "mesh.stage_tp=[1,2] launch.num_processes=4",
            (
                "mesh.stage_tp ([1, 2]) of 3 ranks x mesh.dp_replicate (2) = 6 "
                "must equal launch.num_processes (4)"
            ),
        ),
        (
            "mesh.stage_tp=[2,1] mesh.ep=1 mesh.stage_ep=[4,4]",
            "mesh.stage_ep (4) must divide mesh.dp_replicate (2); nearest: 2",
        ),
        (
            "mesh.stage_tp=[1,4] data.seq_len=30 model.num_kv_heads=4",
            "data.seq_len (30) must be a multiple of mesh.stage_tp (4); nearest: 28 or 32",
        ),
        (
            "mesh.ep=1 mesh.stage_ep=[1,2] model.num_experts=7",
            "mesh.stage_ep (2) must divide model.num_experts (7); nearest: 1 or 7",
        ),
        (
            "pipeline.schedule=u_shape pipeline.stages_per_rank=1 model.num_layers=2",
            (
                "model.num_layers (2) must be at least mesh.pp (2) x "
                "pipeline.stages_per_rank (1) + 1 = 3"
            ),
        ),
        (
            "pipeline.schedule=u_shape",
            'pipeline.stages_per_rank (2) must be 1 with pipeline.schedule ("u_shape")',
        ),
    ],
)
def test_sizes_of_single_stages_keep_the_rules_of_all(overrides: str, message: str) -> None:
    pairs = [tuple(override.split("=")) for override in overrides.split()]
    assert refusal(*pairs) == message  # type: ignore[arg-type]


def test_a_mesh_may_list_the_sizes_of_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "unequal.toml"
    path.write_text("[mesh]\npp = 3\nstage_tp = [1, 2, 1]\n")
    config = resolve(str(path), [("train.global_batch_size", "4")], env={}).config
    assert config.world_size == 4
    assert config.mesh.tp_sizes == (1, 2, 1)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert resolve(str(again), env={}).config == config


def test_a_dense_model_needs_no_experts() -> None:
    config = resolve(None, [("model.num_experts", "0"), ("model.top_k", "9")], env={}).config
    assert [config.model.is_dense(i) for i in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "pipeline.schedule=1f1b pipeline.stages_per_rank=1",
            (
                'pipeline.overlap (true) must be false with pipeline.schedule ("1f1b"): only '
                "interleaved_1f1b or dualpipe_v can have a forward and a backward as one step"
            ),
        ),
        (
            "mesh.ep=1",
            (
                "pipeline.overlap (true) must be false with mesh.ep (1): experts of one rank "
                "exchange nothing to be hidden"
            ),
        ),
        (
            "mesh.etp=2 mesh.tp=2",
            (
                "pipeline.overlap (true) must be false with mesh.etp (2): parts of an expert's "
                "output are summed before their exchange returns, which would be waited for"
            ),
        ),
        (
            "model.num_dense_layers=4",
            (
                "pipeline.overlap (true) must be false with model.num_experts (8) and "
                "model.num_dense_layers (4): no layer has experts"
            ),
        ),
        (
            "train.global_batch_size=8",
            (
                "pipeline.overlap (true) must be false with train.global_batch_size (8) = "
                "mesh.dp_replicate (2) x train.microbatch_size (4): one microbatch has no other "
                "one to hide behind"
            ),
        ),
    ],
)
def test_overlap_is_refused_with_the_reason_where_nothing_could_be_hidden(
    overrides: str, message: str
) -> None:
    pairs = [override.split("=") for override in overrides.split()]
    given = [(key, value) for key, value in pairs]
    assert refusal(*given, ("pipeline.overlap", "true")) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "mesh.dp_shard=2 mesh.dp_replicate=1 pipeline.schedule=zbv",
            (
                'mesh.gather ("block") must be "stage" with pipeline.schedule ("zbv"): weight '
                "gradients would be computed when the parameters of a block are gone, and not be "
                "reduced"
            ),
        ),
        (
            "mesh.dp_shard=2 mesh.dp_replicate=1 pipeline.overlap=true",
            (
                'mesh.gather ("block") must be "stage" with pipeline.overlap (true): a forward '
                "would free what a backward of the same block computes with"
            ),
        ),
        (
            "mesh.ep=2",
            'mesh.gather ("block") must be "stage" with mesh.dp_shard (1): nothing is sharded',
        ),
    ],
)
def test_blocks_are_gathered_where_their_backward_is_whole_and_alone(
    overrides: str, message: str
) -> None:
    pairs = [override.split("=") for override in overrides.split()]
    given = [(key, value) for key, value in pairs]
    assert refusal(*given, ("mesh.gather", "block")) == message


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_overlap_fits_the_quickstart(schedule: str) -> None:
    given = [("pipeline.overlap", "true"), ("pipeline.schedule", schedule)]
    assert resolve(None, given, env={}).config.pipeline.overlap


def test_files_must_exist_and_near_names_are_offered(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    wrong = tmp_path / "korpus.txt"
    assert refusal(("data.paths", str(wrong))) == (
        f'data.paths ("{wrong}") must exist; did you mean corpus.txt?'
    )
    assert refusal(("data.tokenizer", str(tmp_path))) == (
        f'data.tokenizer ("{tmp_path}") must be a file'
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
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
    with pytest.raises(ConfigError, match=r"must equal SLURM_NTASKS \(8\)"):
        resolve(None, env=slurm)


def test_a_slurm_batch_script_starts_its_own_processes() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert external_world(batch) is None
    assert external_world(batch | {"SLURM_STEP_ID": "4294967291"}) is None
    assert external_world(batch | {"SLURM_STEP_ID": "3"}) == World("SLURM_NTASKS", 8)


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
    page = Path(__file__).parents[3] / "docs" / "hp-train" / "config.md"
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
