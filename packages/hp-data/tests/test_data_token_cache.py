"""Tokens that are made once for many runs, by as many processes as there are cores."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hp_base.errors import ConfigError, DataError
from hp_data import Tokenizer, corpus, load_tokenizer
from hp_data import preparation as prepare_module
from hp_data.corpus import find_sources, pieces_of
from hp_data.encode import encode_all
from hp_data.preparation import Cache, prepare
from hp_data.sources.source import Piece

LIMIT = 1 << 30


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator([f"{i} squared is {i * i}, and cubed" for i in range(99)], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of pieces whenever text is tokenised."""
    pieces: list[int] = []

    def counted(given: Any, *args: Any, **keys: Any) -> Any:
        listed = list(given)
        pieces.append(len(listed))
        return encode_all(listed, *args, **keys)

    monkeypatch.setattr(prepare_module, "encode_all", counted)
    return pieces


def _text(folder: Path, name: str = "text", *, lines: int = 300) -> str:
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{name}: {i} squared is {i * i}\n" for i in range(lines)))
    return str(path)


def _pieces(path: str, size: int, monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    monkeypatch.setattr(corpus, "PIECE_BYTES", size)
    return [piece for source in find_sources([path]) for piece in pieces_of(source)]


def test_any_number_of_processes_gives_the_same_ids(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = _pieces(_text(tmp_path), 700, monkeypatch)
    assert len(pieces) > 8
    alone = list(encode_all(pieces, tokenizer, num_processes=0))
    ends = [piece.piece for piece in alone for id_ in piece.tokens if id_ == tokenizer.separator]
    assert ends == pieces[-1:]  # a document does not end with every piece of it
    for num_processes in (1, 3):
        found = list(encode_all(pieces, tokenizer, num_processes=num_processes))
        assert [e.piece for e in found] == pieces
        assert [e.digest for e in found] == [e.digest for e in alone]
        assert [e.tokens.tobytes() for e in found] == [e.tokens.tobytes() for e in alone]


def test_answers_that_came_together_are_not_waited_for(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = _pieces(_text(tmp_path), 700, monkeypatch)[:2]
    waits: list[float] = []

    def slowly() -> Iterator[Piece]:
        yield from pieces
        time.sleep(2)  # both are encoded meanwhile
        waits.clear()

    def on_wait() -> None:
        waits.append(time.monotonic())
        assert len(waits) < 30

    found = encode_all(slowly(), tokenizer, num_processes=1, on_wait=on_wait)
    assert [each.piece for each in found] == pieces


def test_text_that_a_process_cannot_read_is_named_and_none_is_left(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _text(tmp_path)
    with Path(path).open("ab") as file:
        file.write(b"\xff")
    pieces = _pieces(path, 700, monkeypatch)
    with pytest.raises(DataError, match=r"text\.txt must be UTF-8 text"):
        list(encode_all(pieces, tokenizer, num_processes=2))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert not [command for command in commands if "hp_data.encode" in command]


def test_a_process_that_dies_is_told(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = _pieces(_text(tmp_path), 700, monkeypatch)
    whole = Path(tokenizer.path).read_text()
    Path(tokenizer.path).write_text("{}")
    with pytest.raises(ConfigError, match="must be a tokenizers file"):
        list(encode_all(pieces, tokenizer, num_processes=2))
    Path(tokenizer.path).write_text(whole + "\n")
    with pytest.raises(ConfigError, match="changed while it was used"):
        list(encode_all(pieces, tokenizer, num_processes=2))


def test_a_request_to_stop_reaches_no_process_that_tokenises(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = _pieces(_text(tmp_path), 700, monkeypatch)
    made = encode_all(pieces, tokenizer, num_processes=1)
    found = [next(made)]
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if "hp_data.encode" in Path(f"/proc/{pid}/cmdline").read_text():
            assert os.getpgid(int(pid)) != os.getpgid(0)
            os.kill(int(pid), signal.SIGTERM)
    assert len([*found, *made]) == len(pieces)


def test_processes_that_tokenise_have_nothing_of_torch(tmp_path: Path) -> None:
    code = "import sys; import hp_data.encode; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _prepare(directory: Path, text: str, tokenizer: Tokenizer, cache: Cache | None) -> None:
    prepare(directory, paths=[text], tokenizer=tokenizer, eval_fraction=0.1, cache=cache)


def test_text_is_tokenised_once(tmp_path: Path, tokenizer: Tokenizer, made: list[int]) -> None:
    text, cache = _text(tmp_path), Cache(tmp_path / "cache", limit_bytes=LIMIT)
    _prepare(tmp_path / "one", text, tokenizer, cache)
    moved = Path(text).rename(tmp_path / "moved.txt")
    _prepare(tmp_path / "two", str(moved), tokenizer, cache)
    assert len(made) == 1
    assert _files(tmp_path / "one") == _files(tmp_path / "two")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    [entry] = (tmp_path / "cache").iterdir()
    for name in _files(entry):
        assert not (entry / name).samefile(tmp_path / "two" / name)
    for directory, fraction in (("three", 0.2), ("four", 0.1)):
        if directory == "four":
            moved.write_text(moved.read_text() + "more")
        prepare(
            tmp_path / directory,
            paths=[str(moved)],
            tokenizer=tokenizer,
            eval_fraction=fraction,
            cache=cache,
        )
    assert len(made) == 3


def _flip(entry: Path) -> None:
    data = bytearray((entry / "train.bin").read_bytes())
    data[100] ^= 1
    (entry / "train.bin").write_bytes(data)


def _index(entry: Path) -> None:
    (entry / "index.json").write_text("{}")


def _link(entry: Path) -> None:
    (entry / "eval.bin").rename(entry / "real")
    (entry / "eval.bin").symlink_to("real")


def _pipe(entry: Path) -> None:
    (entry / "train.sums").unlink()
    os.mkfifo(entry / "train.sums")


def _missing(entry: Path) -> None:
    (entry / "eval.sums").unlink()


@pytest.mark.parametrize("damage", [_flip, _index, _link, _pipe, _missing])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, tokenizer: Tokenizer, made: list[int], damage: Callable[[Path], None]
) -> None:
    text, cache = _text(tmp_path), Cache(tmp_path / "cache", limit_bytes=LIMIT)
    _prepare(tmp_path / "one", text, tokenizer, cache)
    [entry] = (tmp_path / "cache").iterdir()
    damage(entry)
    for number, directory in enumerate(("two", "three")):
        _prepare(tmp_path / directory, text, tokenizer, cache)
        assert _files(tmp_path / directory) == _files(tmp_path / "one")
        assert len(made) == 2, number
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry.name]


def test_an_entry_under_the_name_of_another_is_not_taken(
    tmp_path: Path, tokenizer: Tokenizer, made: list[int]
) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=LIMIT)
    for name in ("a", "b"):
        _prepare(tmp_path / name, _text(tmp_path, name), tokenizer, cache)
    first, second = (tmp_path / "cache").iterdir()
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    for name in ("a", "b"):
        _prepare(tmp_path / f"{name}-again", _text(tmp_path, name), tokenizer, cache)
        assert _files(tmp_path / f"{name}-again") == _files(tmp_path / name)
    assert len(made) == 4


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_cache_that_others_can_enter_is_left_alone(
    tmp_path: Path, tokenizer: Tokenizer, made: list[int], mode: int
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    text, cache = _text(tmp_path), Cache(tmp_path / "cache", limit_bytes=LIMIT)
    for directory in ("one", "two"):
        _prepare(tmp_path / directory, text, tokenizer, cache)
    assert not list((tmp_path / "cache").iterdir())
    assert len(made) == 2


def test_a_cache_of_another_user_or_behind_a_link_is_left_alone(
    tmp_path: Path, tokenizer: Tokenizer, made: list[int]
) -> None:
    folder = tmp_path / "cache"
    text, cache = _text(tmp_path), Cache(folder, limit_bytes=LIMIT)
    _prepare(tmp_path / "one", text, tokenizer, cache)
    folder.rename(tmp_path / "real")
    folder.symlink_to("real")
    _prepare(tmp_path / "two", text, tokenizer, cache)
    assert len(made) == 2
    folder.unlink()
    (tmp_path / "real").rename(folder)
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
        _prepare(tmp_path / "three", text, tokenizer, cache)
        assert len(made) == 3


def test_the_least_recently_used_entries_go(
    tmp_path: Path, tokenizer: Tokenizer, made: list[int]
) -> None:
    texts = [_text(tmp_path, name) for name in "abc"]
    _prepare(tmp_path / "size", texts[0], tokenizer, None)
    size = sum(len(content) for content in _files(tmp_path / "size").values())
    cache = Cache(tmp_path / "cache", limit_bytes=2 * size + size // 2)
    for number, (text, used) in enumerate(zip(texts, (1, 0, 2), strict=True)):
        _prepare(tmp_path / str(number), text, tokenizer, cache)
        entries = list((tmp_path / "cache").iterdir())
        newest = max(entries, key=lambda entry: entry.stat().st_mtime_ns)
        os.utime(newest, (used, used))
    assert len(entries) == 2
    small = Cache(tmp_path / "cache", limit_bytes=1)
    for number, text in enumerate(texts):
        _prepare(tmp_path / f"{number} again", text, tokenizer, small)
    assert len(made) == 5


def test_runs_that_start_together_share_a_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text, cache = _text(tmp_path), Cache(tmp_path / "cache", limit_bytes=LIMIT)

    def start(number: int) -> None:
        _prepare(tmp_path / f"run-{number}" / "data", text, tokenizer, cache)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    found = [_files(tmp_path / f"run-{number}" / "data") for number in range(8)]
    assert found == [found[0]] * 8
    [entry] = (tmp_path / "cache").iterdir()
    assert _files(entry) == found[0]


def test_bytes_are_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=LIMIT)
    _prepare(tmp_path / "one", _text(tmp_path), load_tokenizer(""), cache)
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is_and_that_it_can_be_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert Cache.of_user(limit_bytes=0) is None
    _prepare(tmp_path / "one", _text(tmp_path), tokenizer, Cache.of_user(limit_bytes=LIMIT))
    assert len(list((tmp_path / "home" / "hp-train").iterdir())) == 1
