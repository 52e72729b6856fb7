"""`hp train` on data as people have them, from the command to the tokens."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_data import load_tokenizer
from hp_data.preparation import prepare
from hp_train.cli import main

pytestmark = pytest.mark.usefixtures("forked_programs")

DOCUMENTS = [f"document {number} is squared {number * number}. " * 5 for number in range(60)]
TINY = {
    "mesh.pp": 1,
    "mesh.dp_replicate": 1,
    "mesh.ep": 1,
    "pipeline.stages_per_rank": 1,
    "model.dim": 16,
    "model.num_layers": 2,
    "model.expert_hidden": 8,
    "model.num_experts": 4,
    "data.seq_len": 16,
    "data.eval_fraction": 0.2,
    "data.field": "content",
    "train.steps": 2,
    "train.global_batch_size": 4,
    "train.microbatch_size": 2,
    "train.sample_tokens": 2,
}


def _train(*paths: Path, out: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    keys = TINY | {"run.output_dir": out, "run.name": "run"} | settings
    command = [sys.executable, "-m", "hp_train", "train", "--data", *map(str, paths)]
    return subprocess.run(
        [*command, *(f"--{key}={value}" for key, value in keys.items())],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(out.parent / "cache")},
    )


def test_columns_and_compressed_lines_train_on_two_ranks(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [*range(30)], "content": DOCUMENTS[:30]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    lines = [json.dumps({"content": each}) + "\n" for each in DOCUMENTS]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:]).encode(), mtime=0))
    done = _train(
        tmp_path / "*.parquet",
        tmp_path / "b.jsonl.gz",
        out=tmp_path / "out",
        **{"mesh.dp_shard": 2},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(lines))
    prepare(
        tmp_path / "tokens",
        paths=[str(plain)],
        field="content",
        tokenizer=load_tokenizer(""),
        eval_fraction=0.2,
    )
    for name in ("train.bin", "train.sums", "eval.bin", "eval.sums"):
        made = (tmp_path / "out" / "run" / "data" / name).read_bytes()
        assert made == (tmp_path / "tokens" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"content": "text"}\n' * 99, mtime=0)[:-9], "cut off"),
        ("a.parquet", b"PAR1 and no more", "a.parquet: "),
        ("a.csv", b"id,body\n1,text\n", "'content', and has id, body: data.field names"),
        ("*.xml", b"", "must match something"),
    ],
    ids=["cut off", "no Parquet", "no column", "no match"],
)
def test_what_cannot_be_read_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    if "*" not in name:
        (tmp_path / name).write_bytes(content)
    keys = [f"--{key}={value}" for key, value in TINY.items()]
    status = main(["train", "--dry-run", "--data", str(tmp_path / name), *keys])
    error = capsys.readouterr().err
    assert status != 0
    assert says in error
    assert error.count("\n") == 1
