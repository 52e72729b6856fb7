"""Keys that must fit each other: `hp_trainer.config.rules`."""

from pathlib import Path

import pytest
from train_refusals import refusal

from hp_trainer.config.options import resolve, to_toml


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
        (
            "run.name=../x",
            'run.name ("../x") must be letters, digits and _ . + - only, 200 at most',
        ),
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
            "pipeline.stage_layers=[1,2]",
            (
                "pipeline.stage_layers ([1, 2]) must have a number for each of mesh.pp (2) x "
                "pipeline.stages_per_rank (2) = 4 stages, which sum to model.num_layers (4)"
            ),
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
            "mesh.tp=4 model.num_kv_heads=4 model.num_experts=0 mesh.ep=1 model.dense_hidden=5",
            (
                "mesh.tp (4) must leave each rank a part of model.dense_hidden (5): parts of 2 "
                "are 3; nearest: 1 or 5"
            ),
        ),
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
