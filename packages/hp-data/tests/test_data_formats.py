"""Every format gives the ids of the plain text that it was made from."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from formats import (
    COLUMNS,
    COMPRESSIONS,
    DOCUMENTS,
    RECORDS,
    as_arrow_file,
    as_csv,
    as_jsonl,
    as_parquet,
    save_dataset,
    save_megatron,
)

from hp_base.errors import DataError
from hp_data import Tokenizer, corpus, load_tokenizer
from hp_data.corpus import find_sources, left_out, look_at, pieces_of
from hp_data.encode import Encoded, encode_all
from hp_data.preparation import digest_of_text, prepare
from hp_data.tokens import TokenFile, read_index

BYTES = load_tokenizer("")


def parts_of(
    *paths: Path | str, tokenizer: Tokenizer = BYTES, field: str = "", num_processes: int = 0
) -> list[Encoded]:
    sources = find_sources([str(path) for path in paths], field)
    pieces = [piece for source in sources for piece in pieces_of(source)]
    return [*encode_all(pieces, tokenizer, num_processes=num_processes)]


def ids_of(*paths: Path | str, tokenizer: Tokenizer = BYTES, field: str = "") -> list[int]:
    made = parts_of(*paths, tokenizer=tokenizer, field=field)
    return [int(token) for part in made for token in part.tokens]


def expected(documents: list[str]) -> list[int]:
    return [byte for each in documents if each for byte in (*each.encode(), 0)]


def words(path: Path) -> Tokenizer:
    """A tokenizer with words, by which a long document is cut at some places alone."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(DOCUMENTS, trainer)
    backend.save(str(path))
    return load_tokenizer(str(path))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("suffix", RECORDS)
def test_records_are_the_same_documents_in_every_format_and_compression(
    tmp_path: Path, suffix: str, compression: str
) -> None:
    path = tmp_path / f"a.{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](RECORDS[suffix](DOCUMENTS)))
    look_at([str(path)])
    made = parts_of(path)
    assert [int(token) for part in made for token in part.tokens] == expected(DOCUMENTS)
    assert sum(part.num_empty for part in made) == 1
    assert sum(part.nbytes for part in made) == path.stat().st_size


@pytest.mark.parametrize("suffix", COLUMNS)
@pytest.mark.parametrize("size", [1 << 25, 400])
def test_columns_are_the_same_documents_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, size: int
) -> None:
    monkeypatch.setattr(corpus, "COLUMN_BYTES", size)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(COLUMNS[suffix](DOCUMENTS))
    look_at([str(path)])
    made = parts_of(path)
    assert [int(token) for part in made for token in part.tokens] == expected(DOCUMENTS)
    assert len([part for part in made if part.is_last]) == -(-path.stat().st_size // size)
    if suffix != "arrow":  # a stream has one reader
        assert len([part for part in made if part.tokens.size]) > (size < 1000) * 3


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("has_words", [True, False])
def test_a_compressed_document_has_the_ids_of_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, has_words: bool
) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 20_000)
    tokenizer = words(tmp_path / "tokenizer.json") if has_words else BYTES
    text = ("\ufeff" + "\r\n".join(DOCUMENTS) + "\n" + "x" * 9000) * 12
    plain, compressed = tmp_path / "a.txt", tmp_path / f"a.txt{compression}"
    plain.write_bytes(text.encode())
    compressed.write_bytes(COMPRESSIONS[compression](text.encode()))
    made = parts_of(compressed, tokenizer=tokenizer)
    assert len(made) > 4
    found = [int(token) for part in made for token in part.tokens]
    assert found == ids_of(plain, tokenizer=tokenizer)


def test_streams_of_gzip_that_follow_each_other_are_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = [gzip.compress(as_jsonl([each]), mtime=0) for each in DOCUMENTS]
    path.write_bytes(b"".join(lines) + bytes(100))
    assert ids_of(path) == expected(DOCUMENTS)


def test_all_formats_together_are_tokenised_by_processes_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    everything = {**RECORDS, **COLUMNS}
    names = [f"a.{suffix}" for suffix in everything if suffix != "feather"]
    for name in names:
        (folder / name).write_bytes(everything[name[2:]](DOCUMENTS))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(as_jsonl(DOCUMENTS), mtime=0))
    told: list[str] = []
    prepare(
        tmp_path / "tokens",
        paths=[str(folder)],
        tokenizer=BYTES,
        eval_fraction=0.1,
        tell=told.append,
    )
    index = read_index(tmp_path / "tokens")
    sizes = [TokenFile(tmp_path / "tokens", split, index).size for split in ("train", "eval")]
    documents = (len(names) + 1) * len(expected(DOCUMENTS))
    assert documents <= sum(sizes) <= documents + 200  # a document that is cut has two ends
    assert told == [
        f"note: {len(names) + 1} documents of data.paths give no tokens, and are left out"
    ]
    assert digest_of_text([str(folder)]) == index.source
    (folder / "a.csv").write_bytes(as_csv([*DOCUMENTS[:-1], "another"]))
    assert digest_of_text([str(folder)]) != index.source


@pytest.mark.parametrize("make", [as_jsonl, as_csv, as_parquet, as_arrow_file])
def test_the_text_is_under_the_name_that_is_given_or_the_only_strings(
    tmp_path: Path, make: Callable[..., bytes]
) -> None:
    suffix = {as_jsonl: "jsonl", as_csv: "csv", as_parquet: "parquet"}.get(make, "arrow")
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(make(DOCUMENTS, "content"))
    assert ids_of(path, field="content") == expected(DOCUMENTS)
    for field in ("body", "id"):
        if make is as_csv and field == "id":  # all columns of a table are strings
            continue
        with pytest.raises(DataError, match=rf"a\.{suffix}.*'{field}', and has id, content: data"):
            ids_of(path, field=field)
    if make is as_csv:
        with pytest.raises(DataError, match=r"'text', and has id, content: data\.field names"):
            look_at([str(path)])
    else:
        assert ids_of(path) == expected(DOCUMENTS)


def test_a_folder_of_datasets_has_the_files_that_its_state_lists(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = save_dataset(tmp_path / "all" / "train", [DOCUMENTS[:20], DOCUMENTS[20:]])
    (folder / "cache-1.arrow").write_bytes(as_arrow_file(["of a map"]))
    assert ids_of(folder) == expected(DOCUMENTS)
    assert left_out([str(folder)]) == (
        "files of data.paths that are left out, no text by their names: .json (2), .arrow (1)"
    )
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert ids_of(tmp_path / "all") == expected(DOCUMENTS)
    save_dataset(tmp_path / "all" / "test", [["held out"]])
    with pytest.raises(DataError, match=r"splits of datasets \(test, train\).*name .*all/train"):
        ids_of(tmp_path / "all")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json lists data-00001-of-00002\.arrow"):
        ids_of(folder)


def test_ids_that_were_made_elsewhere_are_taken_over(tmp_path: Path) -> None:
    documents = [[5, 6, 7, 0], [8, 9], [], [10]]
    whole = [5, 6, 7, 0, 8, 9, 0, 10, 0]
    for dtype in ("uint16", "int32"):
        assert ids_of(save_megatron(tmp_path / "a.bin", documents, dtype)) == whole
    for dtype in ("uint16", "uint32", "int32"):
        np.save(tmp_path / "a.npy", np.asarray(whole[:-1], dtype))
        assert ids_of(tmp_path / "a.npy") == whole
        np.asarray(whole, dtype).tofile(tmp_path / "plain.bin")
        assert ids_of(tmp_path / "plain.bin", field=dtype) == whole
    assert ids_of(tmp_path / "*.bin", field="int32") == whole * 2
    np.save(tmp_path / "a.npy", np.asarray([1, 2, 300], "uint16"))
    with pytest.raises(DataError, match=r"a\.npy: token 2 \(300\) must be below the vocabulary"):
        ids_of(tmp_path / "a.npy")
    for array in (np.zeros((2, 2), "uint16"), np.zeros(2, "float32"), np.array([{}], object)):
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=r"a\.npy must be a file of token ids: "):
            look_at([str(tmp_path / "a.npy")])


def test_patterns_match_as_a_shells_do_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/c/1.txt", "a/2.txt", "a/3.md", "4.txt", ".hidden.txt", "a/[5].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(pattern: str) -> list[str]:
        return [
            str(Path(s.path).relative_to(tmp_path)) for s in find_sources([f"{tmp_path}/{pattern}"])
        ]

    assert names("*.txt") == ["4.txt"]
    assert names("**/*.txt") == ["4.txt", "a/2.txt", "a/[5].txt", "b/c/1.txt"]
    assert names("a/[0-3].*") == ["a/2.txt", "a/3.md"]
    assert names("a/[5].txt") == ["a/[5].txt"]
    assert names("[!a]") == ["b/c/1.txt"]
    with pytest.raises(DataError, match="must match something"):
        names("*.jsonl")


def test_tables_and_json_of_a_folder_are_read_if_they_have_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv(["one"]))
    (tmp_path / "b.csv").write_text("width,height\n1,2\n")
    (tmp_path / "c.json").write_text(json.dumps([{"text": "two"}]))
    (tmp_path / "d.json").write_text(json.dumps([{"name": "three"}]))
    (tmp_path / "e.npy").write_bytes(b"")
    assert ids_of(tmp_path) == expected(["one", "two"])
    assert re.search(r"\.csv \(1\), \.json \(1\), \.npy \(1\)$", left_out([str(tmp_path)]))


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard"), ("s3://a/b", "s3fs")]
)
def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    path = name if "://" in name else str(tmp_path / name)
    if "://" not in name:
        (tmp_path / name).write_bytes(b"text")
    with pytest.raises(DataError, match=rf"needs {module}: pip install 'hp-data\["):
        look_at([path])
