"""Tokenizer files of others: which token ends documents, what text can give, and what explodes."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_base.errors import ConfigError, DataError
from hp_data import Tokenizer, corpus, load_tokenizer
from hp_data.corpus import find_sources, pieces_of
from hp_data.encode import encode_all, try_out
from hp_data.preparation import prepare
from hp_data.tokenizer import byte_tokenizer

tokenizers = pytest.importorskip("tokenizers")
_TEXT = "alpha beta\n\ngamma  delta\tx1 22 333 o'clock caf\u00e9 \u4e2d\u6587\u3002\n"


def _added(name: str, id_: int, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": name, "special": special, **flags}


def _file(folder: Path, content: Mapping[str, Any], *, config: object = None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **content}))
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "tokenizer_config.json").write_text(text)
    return str(folder / "tokenizer.json")


def _words(*special: str, ordinary: tuple[str, ...] = ()) -> dict[str, Any]:
    """A tokenizer of a few words, some of which it calls special."""
    vocab = {name: id_ for id_, name in enumerate(("a", "b", *ordinary, *special))}
    return {
        "added_tokens": [_added(name, vocab[name]) for name in special],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "b"},
    }


@pytest.mark.parametrize(
    ("special", "ordinary", "config", "named"),
    [
        (("<pad>", "<eos>"), ("</s>",), None, ("", "<eos>")),
        (("<|im_start|>", "<|im_end|>"), (), None, ("", "<|im_end|>")),
        (("[PAD]", "[EOS]"), (), None, ("", "[EOS]")),
        ((), ("</s>",), None, ("", "</s>")),
        (("<|endoftext|>", "<|im_end|>"), (), {"eos_token": "<|im_end|>"}, ("", "<|im_end|>")),
        (("<|endoftext|>", "x"), (), {"eos_token": {"content": "x"}}, ("", "x")),
        (("<eos>",), ("</s>",), {"eos_token": "</s>"}, ("", "</s>")),
        (("<eos>",), (), {"eos_token": "<gone>"}, ("", "<eos>")),
        (("<eos>",), (), {"eos_token": None}, ("", "<eos>")),
        (("<eos>", "<x>"), (), {"eos_token": "<eos>"}, ("<x>", "<x>")),
        (("<eos>",), ("end",), None, ("end", "end")),
    ],
)
def test_the_separator_is_asked_for_and_not_guessed_by_its_name(
    tmp_path: Path,
    special: tuple[str, ...],
    ordinary: tuple[str, ...],
    config: object,
    named: tuple[str, str],
) -> None:
    wanted, found = named
    content = _words(*special, ordinary=ordinary)
    tokenizer = load_tokenizer(_file(tmp_path, content, config=config), wanted)
    assert tokenizer.separator_name == found
    assert tokenizer.separator == content["model"]["vocab"][found]
    assert tokenizer.decode([0, tokenizer.separator]) == f"a {found}"


@pytest.mark.parametrize(
    ("special", "config", "wanted", "says"),
    [
        (("<pad>", "<z>"), None, "", r"data\.separator must name the token .*such as <pad>, <z>$"),
        (("<pad>",), None, "<q>", r"data\.separator \(<q>\) must be a token of .*such as <pad>$"),
        (("<eos>",), "{", "", r"cannot read eos_token in .*config\.json.*set data\.separator"),
        (("<eos>",), "[" * 99_999, "", "cannot read eos_token in"),
    ],
)
def test_a_separator_that_nobody_knows_is_refused_with_the_key(
    tmp_path: Path, special: tuple[str, ...], config: object, wanted: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        load_tokenizer(_file(tmp_path, _words(*special), config=config), wanted)
    assert "\n" not in str(refusal.value)


def _trained(kind: str) -> dict[str, Any]:
    """A small tokenizer of one of the usual kinds."""
    models, pre, norm = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.normalizers
    made = tokenizers.Tokenizer(models.BPE())
    trainer = tokenizers.trainers.BpeTrainer
    keys: dict[str, Any] = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    byte_level = tokenizers.Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if kind.startswith("bytes"):
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=kind == "bytes-prefix")
        keys["initial_alphabet"] = pre.ByteLevel.alphabet()
    if kind == "bytes-regex":
        split = pre.Split(byte_level, behavior="isolated")
        made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(use_regex=False)])
        made.normalizer = norm.NFC()
    if kind.startswith("metaspace"):
        scheme = kind.partition("-")[2]
        made.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme)
    if kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.normalizer = norm.NFKC()
        made.pre_tokenizer = pre.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer
        keys["unk_token"] = "<unk>"
    if kind == "word-piece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = norm.BertNormalizer()
        made.pre_tokenizer = pre.BertPreTokenizer()
        trainer = tokenizers.trainers.WordPieceTrainer
    if kind == "llama":
        made.normalizer = norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")])
    # Without words merges would grow to whole lines.
    texts = _TEXT.split() if kind == "llama" else [_TEXT] * 3
    made.train_from_iterator([*texts, *_TEXT], trainer(vocab_size=420, **keys))
    content: dict[str, Any] = json.loads(made.to_str())
    if kind == "bytes-chunks":  # words that are counted from the beginning
        pattern = {"Regex": r"[\s\S]{1,7}"}
        chunks = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        content["pre_tokenizer"]["use_regex"] = False
        steps = [chunks, content["pre_tokenizer"]]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return content


_KINDS = (
    *("bytes", "bytes-prefix", "bytes-regex", "bytes-chunks", "metaspace-always"),
    *("metaspace-first", "unigram", "word-piece", "llama"),
)


@pytest.fixture(scope="module", params=_KINDS)
def usual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(_file(tmp_path_factory.mktemp("usual"), _trained(request.param)))


def _ids(path: Path, tokenizer: Tokenizer, size: int) -> tuple[list[int], int]:
    """All ids of a file cut into pieces, and how many pieces have some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", size)
        pieces = [piece for source in find_sources([str(path)]) for piece in pieces_of(source)]
    made = [e.tokens for e in encode_all(pieces, tokenizer, num_processes=0)]
    return np.concatenate(made).tolist(), sum(ids.size > 1 for ids in made)


def test_text_cut_into_pieces_has_the_ids_of_the_whole(tmp_path: Path, usual: Tokenizer) -> None:
    text = _TEXT * 60
    (tmp_path / "a.txt").write_text(text)
    whole = [*usual.encode(text).tolist(), usual.separator]
    found, num_pieces = _ids(tmp_path / "a.txt", usual, 700)
    assert found == whole
    # Where words are counted from the beginning, text may be cut where the count begins anew.
    is_counted = "{1,7}" in Path(usual.path).read_text()
    assert (num_pieces <= 2) if is_counted else (num_pieces > 3)


@pytest.mark.sample(
    *(f"{name}- " for name in ("bytes", "bytes-regex", "metaspace-first", "unigram", "llama")),
    *(f"{name}-\\n" for name in ("bytes", "metaspace-always", "word-piece")),
)
@pytest.mark.parametrize("between", [" ", "\n"])
def test_text_without_letters_is_cut_as_well(
    tmp_path: Path, usual: Tokenizer, between: str
) -> None:
    (tmp_path / "a.txt").write_text(between.join(str(number**2) for number in range(1000)))
    whole = usual.encode((tmp_path / "a.txt").read_text()).tolist()
    found, num_pieces = _ids(tmp_path / "a.txt", usual, 700)
    assert found == [*whole, usual.separator]
    # Not where words are counted from the beginning, nor where a line begins no word.
    assert between == "\n" or "{1,7}" in Path(usual.path).read_text() or num_pieces > 3


_PARTS = (
    "alpha",
    " beta",
    "\n",
    "\n\n",
    "  ",
    "x1",
    "'s",
    "\u4e2d",
    "\u3002",
    "\u0301",
    "\r\n",
    "!",
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.sampled_from(_PARTS),
        max_size=120,
    ),
    st.integers(min_value=1, max_value=90),
)
def test_no_text_has_other_ids_where_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, usual: Tokenizer, parts: list[str], size: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes("".join(["a", *parts]).encode())
    whole = usual.encode(corpus.plain_lines("".join(["a", *parts]))).tolist()
    assert _ids(path, usual, size)[0] == [*whole, usual.separator]


def test_special_tokens_in_text_are_text(tmp_path: Path, usual: Tokenizer) -> None:
    del tmp_path
    text = "alpha</s>beta <unk> </s> </s>"
    ids = usual.encode(text).tolist()
    assert usual.separator not in ids
    assert usual.decode([usual.separator]).strip() == "</s>"


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_separator_written_in_a_document_ends_none(tmp_path: Path, ordinary: bool) -> None:
    content = _trained("bytes")
    content["added_tokens"][1]["special"] = not ordinary
    tokenizer = load_tokenizer(_file(tmp_path, content), "</s>")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "alpha</s>beta"}) + "\n")
    [made] = encode_all(
        (p for s in find_sources([str(tmp_path / "a.jsonl")]) for p in pieces_of(s)),
        tokenizer,
        num_processes=0,
    )
    assert np.flatnonzero(made.tokens == tokenizer.separator).tolist() == [made.tokens.size - 1]
    assert tokenizer.decode(made.tokens[:-1].tolist()).replace(" ", "") == "alpha</s>beta"


def test_a_separator_that_stands_for_unknown_words_is_refused_once_there_are_some(
    tmp_path: Path,
) -> None:
    content = _words("</s>")
    content["model"]["unk_token"] = "</s>"
    tokenizer = load_tokenizer(_file(tmp_path, content))
    (tmp_path / "a.txt").write_text("a b c")
    with pytest.raises(DataError, match=r"must not give the separator .*set data\.separator"):
        _ids(tmp_path / "a.txt", tokenizer, 99)


def test_dropout_of_merges_is_off(tmp_path: Path) -> None:
    content = _trained("bytes")
    plain = load_tokenizer(_file(tmp_path, content)).encode(_TEXT)
    content["model"]["dropout"] = 0.5
    dropped = load_tokenizer(_file(tmp_path, content)).encode(_TEXT)
    assert np.array_equal(plain, dropped)


def test_documents_of_no_tokens_leave_no_separator_and_are_counted(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_file(tmp_path / "tokenizer", _words("</s>")))
    folder = tmp_path / "text"
    folder.mkdir()
    lines = ["a b " * 40, "", " \n", "b"] * 5
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    for name in ("b", "d"):
        (folder / f"{name}.txt").write_text(" \n ")
    (folder / "c.txt").write_text("a b")
    told: list[str] = []
    prepare(
        tmp_path / "data",
        paths=[str(folder)],
        tokenizer=tokenizer,
        eval_fraction=0.2,
        tell=told.append,
    )
    ids = np.concatenate(
        [np.fromfile(tmp_path / "data" / f"{split}.bin", np.uint16) for split in ("train", "eval")]
    )
    is_end = ids == tokenizer.separator
    assert not (is_end[1:] & is_end[:-1]).any()
    assert not is_end[0]
    notes = [line for line in told if not line.startswith("tokenised ")]  # of a slow machine
    assert notes == ["note: 12 documents of data.paths give no tokens, and are left out"]


def _regex(content: dict[str, Any]) -> None:
    pattern = {"Regex": "(?:a|a|aa)+(?:a|aa)+(?:a|aa)+(?:a|aa)+[0-9]Q"}
    content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "b"}


def _doubled(content: dict[str, Any]) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}


def _deep(content: dict[str, Any]) -> None:
    for _ in range(200):
        content["normalizer"] = {"type": "Sequence", "normalizers": [content.get("normalizer")]}


def _far(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["z"] = 2**32 - 1


@pytest.mark.sample("_regex", "_deep", "_far")  # the other takes half a minute
@pytest.mark.parametrize("explode", [_regex, _doubled, _deep, _far])
def test_a_tokenizer_that_explodes_is_refused_in_bounds(
    tmp_path: Path, explode: Callable[[dict[str, Any]], None]
) -> None:
    content = _words("</s>")
    explode(content)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ConfigError, match=r"data\.tokenizer \(") as refusal:
        try_out(_file(tmp_path, content), "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "\n" not in str(refusal.value)
    assert after.ru_utime - before.ru_utime < 60
    assert after.ru_maxrss < 3 << 20  # KiB


def test_a_tokenizer_that_doubles_text_is_aborted_and_named(tmp_path: Path) -> None:
    content = _words("</s>")
    _doubled(content)
    path = _file(tmp_path, content)
    code = "import sys; from hp_data.encode import try_out; try_out(sys.argv[1], '')"
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -v 300000; exec {sys.executable} -c "{code}" {path}'],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    last = ended.stderr.splitlines()[-1]
    assert "must be another: for a few words it takes more memory than a tokenizer should" in last


def test_bytes_as_a_file_give_the_ids_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "\0"}))
    of_file, plain = load_tokenizer(str(tmp_path / "tokenizer.json")), load_tokenizer("")
    text = "".join(map(chr, [*range(1, 0xD800, 7), *range(0xE000, 0x11000, 7), 0x1F680]))
    ids = of_file.encode(text).tolist()
    assert ids == plain.encode(text).tolist()
    assert of_file.decode(ids) == text
    assert (of_file.vocab_size, of_file.separator) == (plain.vocab_size, plain.separator)
