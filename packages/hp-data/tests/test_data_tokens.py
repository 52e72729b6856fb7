"""Tokens on disk: nothing is read that is not what was written."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hp_base.errors import ConfigError, DataError
from hp_data import Tokenizer, load_tokenizer
from hp_data.dataset import Dataset
from hp_data.preparation import prepare
from hp_data.tokens import CHUNK_BYTES, INDEX, Index, TokenFile, read_index, sealed

BYTES = load_tokenizer("")


def _prepare(tmp_path: Path, *, chunks: int = 4, eval_fraction: float = 0.2) -> Path:
    text = tmp_path / "text.txt"
    if not text.exists():
        lines = (f"{i} squared is {i * i}, and cubed {i**3}\n" for i in range(10**9))
        content = ""
        while len(content) < chunks * CHUNK_BYTES:
            content += "".join(next(lines) for _ in range(100))
        text.write_text(content)
    directory = tmp_path / "run" / "data"
    prepare(directory, paths=[str(text)], tokenizer=BYTES, eval_fraction=eval_fraction)
    return directory


def _read_all(directory: Path) -> None:
    for split in ("train", "eval"):
        data = Dataset.open(directory, split, seq_len=16, seed=0)
        data.batch(range(data.num_sequences))


def test_every_token_is_in_exactly_one_split(tmp_path: Path) -> None:
    directory = _prepare(tmp_path, chunks=8)
    text = (tmp_path / "text.txt").read_bytes()
    train, held = ((directory / f"{s}.bin").read_bytes() for s in ("train", "eval"))
    # A window is cut into what is trained on and what is held out, each with a separator.
    parts = [
        part for pair in zip(train.split(b"\0"), held.split(b"\0"), strict=True) for part in pair
    ]
    assert b"".join(parts) == text
    assert len(parts) > 20
    assert len(held) / len(text) == pytest.approx(0.2, rel=0.01)
    assert len(set(parts)) == len([part for part in parts if part]) + 1


@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.5, 0.99])
def test_as_much_is_held_out_as_asked_for(tmp_path: Path, fraction: float) -> None:
    directory = _prepare(tmp_path, chunks=40, eval_fraction=fraction)
    sizes = [(directory / f"{s}.bin").stat().st_size for s in ("train", "eval")]
    assert sizes[1] / sum(sizes) == pytest.approx(fraction, rel=0.02)


@pytest.mark.parametrize("num_files", [1, 2, 20])
def test_a_little_text_is_enough_at_the_defaults(tmp_path: Path, num_files: int) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number}.txt").write_text(f"This is document {number}. " * (240 // num_files))
    paths = [str(folder if num_files > 1 else folder / "0.txt")]
    prepare(tmp_path / "data", paths=paths, tokenizer=BYTES, eval_fraction=0.02)
    for split in ("train", "eval"):
        assert Dataset.open(tmp_path / "data", split, seq_len=128, seed=0).num_sequences


def test_the_order_of_reading_and_the_names_do_not_matter(tmp_path: Path) -> None:
    digests = []
    for folder, names in (("one", "abc"), ("two", "xyz")):
        (tmp_path / folder).mkdir()
        for number in (2, 0, 1):
            path = tmp_path / folder / f"{names[number]}.txt"
            path.write_text(f"document {number} " * 500)
        directory = tmp_path / f"data-{folder}"
        prepare(directory, paths=[str(path.parent)], tokenizer=BYTES, eval_fraction=0.1)
        index = read_index(directory)
        assert isinstance(index, Index)
        digests.append((index.train, index.eval, index.source))
    assert digests[0] == digests[1]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words in a row, " * 500}) + "\n"
    peaks = []
    for megabytes in (8, 80):
        text = tmp_path / f"{megabytes}.jsonl"
        with text.open("w") as file:
            for _ in range(megabytes * 100):
                file.write(line)
        tracemalloc.start()
        directory = tmp_path / f"data-{megabytes}"
        prepare(directory, paths=[str(text)], tokenizer=BYTES, eval_fraction=0.02)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        text.unlink()
        shutil.rmtree(directory)
    assert peaks[1] < 1.2 * peaks[0]


def _flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_wrong_chunk_is_found_when_it_is_touched_and_named(tmp_path: Path, chunk: int) -> None:
    directory = _prepare(tmp_path)
    _flip(directory / "train.bin", chunk * CHUNK_BYTES + 77)
    data = Dataset.open(directory, "train", seq_len=64, seed=None)
    per_chunk = CHUNK_BYTES // 64
    data.batch(range(per_chunk + 1, 2 * per_chunk - 1))
    with pytest.raises(DataError, match=rf"train\.bin: chunk {chunk} of 4 is not what was written"):
        data.num_targets(range(chunk * per_chunk + 9, chunk * per_chunk + 10))


def _rotate(path: Path) -> None:
    data = np.fromfile(path, dtype=np.uint8)
    np.roll(data, 1).tofile(path)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _swap(path: Path) -> None:
    other = path.with_name(path.name.replace("train", "@").replace("eval", "train"))
    shutil.copy(other.with_name(other.name.replace("@", "eval")), path)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [_rotate, _cut, _grow, _zero, _swap, _link, _pipe, _folder, Path.unlink]
)
@pytest.mark.parametrize("name", ["train.bin", "train.sums", "eval.bin", "eval.sums", INDEX])
def test_files_that_are_not_what_was_written_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    directory = _prepare(tmp_path)
    if name != INDEX or damage is not _swap:
        damage(directory / name)
        with pytest.raises(DataError, match=re_name(name)) as refusal:
            _read_all(directory)
        assert "\n" not in str(refusal.value)
    else:
        (directory / INDEX).write_text("{}")
        with pytest.raises(DataError, match=INDEX):
            _read_all(directory)


def re_name(name: str) -> str:
    """The name of a file or of its index, with which it is compared."""
    return f"{name}|{INDEX}".replace(".", r"\.")


FIELDS: dict[str, list[object]] = {
    "format": [1, 3, "2", None],
    "dtype": ["int64", "uint16", "", 8, None],
    "vocab_size": [0, -1, 2**60, 10**30, 255, "256", 256.5, None, True],
    "separator": [-1, 256, 2**40, "0", None],
    "tokenizer": ["", "another", 1],
    "eval_fraction": [0.3, -1, "0.2", [0.2]],
    "source": ["", "0" * 32, "0" * 31, 7],
    "train": [None, {}, [], {"tokens": -1}, {"tokens": 2**70, "digest": "0" * 32}],
    "seal": ["", "0" * 32, None],
    "more": [1],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in FIELDS.items() for v in vs])
def test_an_index_that_says_something_else_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    directory = _prepare(tmp_path, chunks=1)
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps(index | {name: value}))
    with pytest.raises(DataError, match=INDEX.replace(".", r"\.")) as refusal:
        _read_all(directory)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{", '{"format":2}', "[" * 60_000, '"\x1b[2J"', "\ufeff{}", "x" * 10**6],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    directory = _prepare(tmp_path, chunks=1)
    (directory / INDEX).write_text(content)
    with pytest.raises(DataError, match=r"index\.json") as refusal:
        _read_all(directory)
    assert str(refusal.value).isprintable()


def test_a_token_that_no_tokenizer_gives_is_refused_though_its_digest_is_right(
    tmp_path: Path,
) -> None:
    directory = _prepare(tmp_path, chunks=1)
    index = read_index(directory)
    assert isinstance(index, Index)
    forged = msgspec.structs.replace(index, vocab_size=60)
    (directory / INDEX).write_bytes(msgspec.json.encode(sealed(forged)))
    with pytest.raises(DataError, match=r"token \(\d+\) must be below vocab_size \(60\)"):
        _read_all(directory)


def test_a_file_that_is_changed_while_it_is_read_is_found(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    data = Dataset.open(directory, "train", seq_len=64, seed=None)
    data.batch(range(8))
    with (directory / "train.bin").open("r+b") as file:
        file.write(b"other text")
    with pytest.raises(DataError, match="chunk 0 of 4 is not what was written"):
        data.batch(range(8))
    os.truncate(directory / "train.bin", CHUNK_BYTES)
    with pytest.raises(DataError, match="chunk 1 of 4 is cut off"):
        data.batch(range(CHUNK_BYTES // 64 + 1, CHUNK_BYTES // 64 + 2))


def test_a_file_that_takes_the_place_of_an_open_one_is_not_read(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    data = Dataset.open(directory, "train", seq_len=64, seed=None)
    before = data.batch(range(8)).tokens
    other = tmp_path / "other"
    other.write_bytes(bytes(10))
    other.replace(directory / "train.bin")
    assert data.batch(range(8)).tokens.equal(before)


def test_a_chunk_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.open(_prepare(tmp_path), "train", seq_len=64, seed=0)
    compared: list[int] = []
    verified = TokenFile.verified

    def counted(file: TokenFile, chunk: int) -> bytes:
        compared.append(chunk)
        return verified(file, chunk)

    monkeypatch.setattr(TokenFile, "verified", counted)
    for _ in range(3):
        data.batch(range(data.num_sequences))
        data.num_targets(range(data.num_sequences), ahead=1)
    assert sorted(compared) == [0, 1, 2, 3]


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "new").mkdir()
    for target in (theirs, directory):
        link = tmp_path / "new" / "data"
        link.symlink_to(target)
        with pytest.raises(DataError, match="must be a directory and no symbolic link"):
            prepare(link, paths=[], tokenizer=BYTES, eval_fraction=0.2)
        link.unlink()
    assert not list(theirs.iterdir())


def test_a_folder_without_an_index_is_not_trusted(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    (directory / INDEX).unlink()
    with pytest.raises(DataError, match=r"index\.json is missing"):
        prepare(directory, paths=[], tokenizer=BYTES, eval_fraction=0.2)


def _tokenizer(
    path: Path, *, vocab_size: int = 300, extra: str = "<|endoftext|>", word: str = "squared"
) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[extra])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator([f"{i} {word} is {i * i}, and cubed" for i in range(99)], trainer)
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    backend.save(str(path))
    return load_tokenizer(str(path))


def test_the_rest_of_a_long_text_gives_its_share_and_no_more(tmp_path: Path) -> None:
    rest = 5000  # behind one window: a text of its own would give 1024
    (tmp_path / "a.txt").write_text("x" * (8192 * 10 + rest - 1))
    prepare(tmp_path / "data", paths=[str(tmp_path / "a.txt")], tokenizer=BYTES, eval_fraction=0.1)
    held = Dataset.open(tmp_path / "data", "eval", seq_len=8, seed=None).tokens[:]
    assert int((held == ord("x")).sum()) == 8192 + rest // 10 - 1  # the last is the separator


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    tokenizer = _tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be the one"):
        prepare(directory, paths=[], tokenizer=tokenizer, eval_fraction=0.2)


def test_data_of_another_tokenizer_with_as_many_tokens_are_refused(tmp_path: Path) -> None:
    one, other = (
        _tokenizer(tmp_path / f"{word}.json", vocab_size=50, word=word)
        for word in ("squared", "doubled")
    )
    assert (one.vocab_size, one.separator) == (other.vocab_size, other.separator)
    (tmp_path / "a.txt").write_text("12 squared is 144. " * 99)
    paths = [str(tmp_path / "a.txt")]
    for tokenizer in (one, one):
        prepare(tmp_path / "data", paths=paths, tokenizer=tokenizer, eval_fraction=0.2)
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be the one .* whose tokenizer"):
        prepare(tmp_path / "data", paths=paths, tokenizer=other, eval_fraction=0.2)


def test_data_with_another_share_held_out_are_refused(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.eval_fraction \(0\.3\) must equal .* \(0\.2\)"):
        prepare(directory, paths=[], tokenizer=BYTES, eval_fraction=0.3)


def test_a_tokenizer_does_not_cut_texts_off_or_fill_them_up(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path / "tokenizer.json")
    text = "12 squared is 144, and cubed 1728"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.decode(tokenizer.encode("1").tolist()) == "1"


def test_a_tokenizer_that_knows_no_end_of_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.separator must name .*, such as <\|other\|>$"):
        _tokenizer(tmp_path / "tokenizer.json", extra="<|other|>")
