"""Object storage: a real server of S3's protocol on loopback, also when it fails."""

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats import DOCUMENTS, as_csv, as_jsonl, as_parquet, save_megatron

from hp_base.errors import DataError
from hp_data import corpus, load_tokenizer
from hp_data.corpus import find_sources, left_out, look_at, pieces_of
from hp_data.encode import encode_all
from hp_data.preparation import digest_of_text, prepare
from hp_data.tokens import read_index

pytest.importorskip("s3fs")
servers = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore")

BYTES = load_tokenizer("")
EXPECTED = [byte for each in DOCUMENTS if each for byte in (*each.encode(), 0)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    started = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with a new bucket, `corpus`."""
    system = _connected(server, monkeypatch)
    system.mkdir("corpus")
    yield system
    system.rm("corpus", recursive=True)


def _connected(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    # The system that is read by must not know what this one has listed.
    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def _ids(*paths: str, field: str = "", num_processes: int = 0) -> list[int]:
    pieces = [piece for source in find_sources(paths, field) for piece in pieces_of(source)]
    made = encode_all(pieces, BYTES, num_processes=num_processes)
    return [int(token) for part in made for token in part.tokens]


def test_objects_are_read_as_files_are(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 2000)
    files = {
        "a.jsonl": as_jsonl(DOCUMENTS),
        "b.jsonl.gz": gzip.compress(as_jsonl(DOCUMENTS)),
        "c.csv": as_csv(DOCUMENTS),
        "more/d.parquet": as_parquet(DOCUMENTS),
        "more/e.xml": b"<a/>",
    }
    for name, content in files.items():
        bucket.pipe_file(f"corpus/data/{name}", content)
    assert _ids("s3://corpus/data/a.jsonl") == EXPECTED
    assert _ids("s3://corpus/data") == EXPECTED * 4
    assert _ids("s3://corpus/data/*.jsonl*", "s3://corpus/data/more/d.parquet") == EXPECTED * 3
    assert left_out(["s3://corpus/data"]).endswith(": .xml (1)")
    ids = save_megatron(tmp_path / "m.bin", [[5, 6, 0], [7]])
    for path in (ids, ids.with_suffix(".idx")):
        bucket.put_file(str(path), f"corpus/ids/{path.name}")
    assert _ids("s3://corpus/ids/m.bin") == [5, 6, 0, 7, 0]


def test_processes_read_objects_and_a_resume_finds_the_same_text(
    bucket: Any, tmp_path: Path
) -> None:
    bucket.pipe_file("corpus/a.parquet", as_parquet(DOCUMENTS))
    bucket.pipe_file("corpus/b.txt.gz", gzip.compress("\n".join(DOCUMENTS).encode()))
    look_at(["s3://corpus"])
    prepare(tmp_path / "t", paths=["s3://corpus"], tokenizer=BYTES, eval_fraction=0.2)
    assert digest_of_text(["s3://corpus"]) == read_index(tmp_path / "t").source
    (tmp_path / "a.parquet").write_bytes(as_parquet(DOCUMENTS))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(DOCUMENTS).encode()))
    assert digest_of_text([str(tmp_path / name) for name in ("a.parquet", "b.txt.gz")]) == (
        read_index(tmp_path / "t").source
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_an_object_that_changes_or_goes_is_one_line(bucket: Any, name: str) -> None:
    content = {"a.jsonl": as_jsonl(DOCUMENTS), "a.parquet": as_parquet(DOCUMENTS)}
    raw = content.get(name) or gzip.compress(as_jsonl(DOCUMENTS))
    bucket.pipe_file(f"corpus/{name}", raw)
    [source] = find_sources([f"s3://corpus/{name}"])
    for changed in (raw[:-40], None):
        if changed is None:
            bucket.rm_file(f"corpus/{name}")
        else:
            bucket.pipe_file(f"corpus/{name}", changed)
        with pytest.raises(DataError, match=rf"corpus/{name}") as refusal:
            [*encode_all(pieces_of(source), BYTES, num_processes=1)]
        assert str(refusal.value).isprintable()


def test_what_is_not_there_is_one_line(bucket: Any) -> None:
    bucket.pipe_file("corpus/a.xml", b"<a/>")
    for path, says in (
        ("s3://corpus/nothing", "must exist"),
        ("s3://no-such-bucket/a", "must exist|cannot read"),
        ("s3://corpus/*.jsonl", "must exist"),
        ("s3://corpus", "must have files of text"),
        ("http://127.0.0.1/a", "must be a path, or begin with s3://, gs://, az://"),
        ("hf://datasets/a", "must be a path, or begin with"),
    ):
        with pytest.raises(DataError, match=says) as refusal:
            look_at([path])
        assert str(refusal.value).isprintable()


def test_a_server_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        _connected(address, monkeypatch)
        with pytest.raises(DataError, match=r"cannot read s3://corpus/a\.jsonl: ") as refusal:
            look_at(["s3://corpus/a.jsonl"])
    assert str(refusal.value).isprintable()
