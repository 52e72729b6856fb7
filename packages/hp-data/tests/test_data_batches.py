import fcntl
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hp_base.errors import ConfigError, DataError
from hp_data import load_tokenizer
from hp_data.corpus import find_sources
from hp_data.dataset import Dataset
from hp_data.preparation import prepare
from hp_data.tokens import TokenWriter

BYTES = load_tokenizer("")


def _corpus(folder: Path, count: int = 40) -> str:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"document {i} " * 20)
    return str(folder)


def _prepare(tmp_path: Path, count: int = 40) -> Path:
    paths = [_corpus(tmp_path / "corpus", count)]
    prepare(tmp_path / "data", paths=paths, tokenizer=BYTES, eval_fraction=0.2)
    return tmp_path / "data"


def test_bytes_round_trip_any_text() -> None:
    text = "héllo, wörld\n\tπ"
    assert BYTES.decode(BYTES.encode(text).tolist()) == text
    assert BYTES.vocab_size == 256


def test_the_standard_library_is_there_without_any_download() -> None:
    paths = [source.path for source in find_sources([])]
    assert len(paths) > 100
    assert paths == sorted(paths, key=Path)
    assert all(path.endswith(".py") for path in paths)


def test_a_link_to_nothing_in_the_standard_library_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ast.py").write_text("x = 1")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))  # noqa: ARG005
    assert [Path(source.path).name for source in find_sources([])] == ["ast.py"]


KILLED = """
import os, signal, sys
from pathlib import Path
from hp_data import load_tokenizer, prepare

directory, corpus = sys.argv[1:]

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]) == directory:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
prepare(Path(directory), paths=[corpus], tokenizer=load_tokenizer(""), eval_fraction=0.2)
"""
FILES = {"index.json", "train.bin", "train.sums", "eval.bin", "eval.sums"}


def test_two_nodes_may_prepare_the_same_directory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_have_written = threading.Barrier(2)
    finish = TokenWriter.finish

    def finish_together(writer: TokenWriter) -> Any:
        split = finish(writer)
        both_have_written.wait(timeout=10)
        return split

    monkeypatch.setattr(TokenWriter, "finish", finish_together)
    corpus, directory = _corpus(tmp_path / "corpus"), tmp_path / "run" / "data"

    def prepare_as_node() -> None:
        prepare(directory, paths=[corpus], tokenizer=BYTES, eval_fraction=0.2)

    with ThreadPoolExecutor(2) as pool:
        for node in [pool.submit(prepare_as_node) for _ in range(2)]:
            node.result()
    data = Dataset.open(directory, "train", seq_len=8, seed=0)
    assert data.batch(range(data.num_sequences)).tokens.shape == (data.num_sequences, 8)
    assert {path.name for path in directory.iterdir()} == FILES
    assert [path.name for path in directory.parent.iterdir()] == ["data"]


def test_what_a_killed_start_left_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    corpus, run = _corpus(tmp_path / "corpus"), tmp_path / "run"
    program = [sys.executable, "-c", _KILLED_BEFORE_THE_RENAME, str(run / "data"), corpus]
    assert subprocess.run(program, timeout=60, check=False).returncode == -signal.SIGKILL
    assert [path.suffix for path in run.iterdir()] == [".tmp"]
    living = run / f"data.{'0' * 32}.tmp"
    living.mkdir()
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    prepare(run / "data", paths=[corpus], tokenizer=BYTES, eval_fraction=0.2)
    assert {path.name for path in run.iterdir()} == {"data", living.name}
    assert {path.name for path in (run / "data").iterdir()} == FILES
    os.close(descriptor)
    prepare(run / "data", paths=[corpus], tokenizer=BYTES, eval_fraction=0.2)
    assert [path.name for path in run.iterdir()] == ["data"]


_KILLED_BEFORE_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from hp_data import load_tokenizer
from hp_data.preparation import prepare

directory, corpus = Path(sys.argv[1]), sys.argv[2]

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]) == str(directory):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
prepare(directory, paths=[corpus], tokenizer=load_tokenizer(""), eval_fraction=0.2)
"""


def test_prepared_data_survives_a_change_of_its_sources(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    before = (directory / "train.bin").read_bytes()
    (tmp_path / "corpus" / "000.txt").write_text("changed")
    prepare(directory, paths=[str(tmp_path / "corpus")], tokenizer=BYTES, eval_fraction=0.2)
    assert (directory / "train.bin").read_bytes() == before


def test_targets_are_the_inputs_shifted_by_one(tmp_path: Path) -> None:
    data = Dataset.open(_prepare(tmp_path), "train", seq_len=16, seed=None, separate=False)
    inputs, targets, documents, _ = data.batch(range(3))
    assert documents == ((16,),) * 3
    assert data.num_targets(range(3)) == 48
    for ahead in (1, 15, 16, 40):
        assert data.num_targets(range(3), ahead=ahead) == 3 * targets[0, ahead:].numel()
    assert inputs.shape == targets.shape == (3, 16)
    stream = torch.from_numpy(data.tokens[0:49].astype("int64"))
    assert torch.equal(inputs.flatten(), stream[:48])
    assert torch.equal(targets.flatten(), stream[1:49])


@pytest.mark.parametrize(("size", "sequences"), [(9, 1), (16, 1), (17, 2), (24, 2)])
def test_a_sequence_has_the_target_of_its_last_token(size: int, sequences: int) -> None:
    data = Dataset(np.arange(size, dtype=np.uint8), seq_len=8, seed=None, digest="", separator=None)
    assert data.num_sequences == sequences
    assert data.batch(range(sequences)).targets[-1, -1] == 8 * sequences


def test_documents_are_kept_apart() -> None:
    stream = np.frombuffer(b"abc\0de\0\0fghijklmnopq\0", dtype=np.uint8)
    data = Dataset(stream, seq_len=8, seed=None, digest="", separator=0)
    tokens, targets, documents, _ = data.batch(range(2))
    assert documents == ((4, 3, 1), (8,))
    assert targets[0].tolist() == [ord("b"), ord("c"), 0, -1, ord("e"), 0, -1, -1]
    assert torch.equal(targets[1, :7], tokens[1, 1:])
    alone = data.batch(range(1))
    assert torch.equal(alone.tokens, tokens[:1])
    assert torch.equal(alone.targets, targets[:1])
    assert data.num_targets(range(2)) == int((targets >= 0).sum()) == 13
    learned = targets >= 0
    for ahead in range(1, 9):
        learned = learned[:, :-1] & (targets[:, ahead:] >= 0)
        assert data.num_targets(range(2), ahead=ahead) == int(learned.sum())


def test_a_pass_reads_every_sequence_once_in_an_order_fixed_by_the_seed(tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    data = Dataset.open(directory, "train", seq_len=16, seed=1)
    n = data.num_sequences
    rows = data.batch(range(n))[0]
    plain = Dataset.open(directory, "train", seq_len=16, seed=None).batch(range(n))[0]
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, plain.tolist()))
    assert not torch.equal(rows, plain)
    again = Dataset.open(directory, "train", seq_len=16, seed=1)
    assert torch.equal(again.batch(range(5, 9))[0], rows[5:9])
    assert not torch.equal(data.batch(range(n, 2 * n))[0], rows)


def test_too_little_text_for_one_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must exceed data\.seq_len"):
        Dataset.open(_prepare(tmp_path), "train", seq_len=10**6, seed=0)


def test_a_hugging_face_tokenizer_file_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.train_from_iterator(["def f(x): return x"] * 4, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.separator == backend.token_to_id("<|endoftext|>")
    assert tokenizer.decode(tokenizer.encode("return x").tolist()) == "return x"


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_every_file_is_a_sign_of_life(tmp_path: Path) -> None:
    beats: list[None] = []
    prepare(
        tmp_path / "data",
        paths=[_corpus(tmp_path / "corpus", 7)],
        tokenizer=BYTES,
        eval_fraction=0.5,
        on_progress=lambda: beats.append(None),
    )
    assert len(beats) == 7
