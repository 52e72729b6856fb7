import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_base.errors import ConfigError, DataError
from hp_data import load_tokenizer
from hp_data.dataset import Dataset, best_fit
from hp_data.preparation import prepare
from hp_trainer.config import Config, DataConfig, MeshConfig, rules
from hp_trainer.config.options import with_keys
from hp_trainer.model.block import look_ahead

BYTES = load_tokenizer("")
LENGTHS = {
    "one document": [5],
    "exactly a sequence": [16, 16],
    "longer than a sequence": [40, 3, 33, 64],
    "empty documents": [1, 1, 1],
    "many": np.random.default_rng(0).integers(1, 40, size=500).tolist(),
    "lognormal": np.clip(np.random.default_rng(1).lognormal(1.5, 1.1, 3000), 1, 99)
    .astype(int)
    .tolist(),
}


def _ends(lengths: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.cumsum(lengths, dtype=np.int64) - 1


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("look_ahead", [1, 4, 1024])
def test_every_token_is_in_one_sequence_and_no_short_document_is_cut(
    name: str, look_ahead: int
) -> None:
    lengths, seq_len = LENGTHS[name], 16
    total = sum(lengths)
    packs = best_fit(_ends(lengths), num_tokens=total, seq_len=seq_len, look_ahead=look_ahead)
    spans = sorted(zip(packs.begins.tolist(), packs.lengths.tolist(), strict=True))
    assert [begin for begin, _ in spans] == [
        0,
        *itertools.accumulate(length for _, length in spans[:-1]),
    ]
    assert sum(length for _, length in spans) == total
    starts = [0, *itertools.accumulate(lengths)]
    for begin, length in zip(starts, lengths, strict=False):
        if length <= seq_len:
            assert (begin, length) in spans
    ends = {*starts[1:]}
    for begin, length, goes_on in zip(packs.begins, packs.lengths, packs.has_next, strict=True):
        assert goes_on == (begin + length not in ends)
    for index in range(packs.num_sequences):
        pieces = packs.pieces(index)
        assert 0 < packs.lengths[pieces].sum() <= seq_len
        # A piece that goes on elsewhere fills its sequence: nothing comes after it.
        assert not packs.has_next[pieces].any() or packs.lengths[pieces].tolist() == [seq_len]


def test_a_document_moves_no_further_than_the_look_ahead() -> None:
    lengths, seq_len, look_ahead = LENGTHS["lognormal"], 16, 8
    ends = _ends(lengths)
    packs = best_fit(ends, num_tokens=sum(lengths), seq_len=seq_len, look_ahead=look_ahead)
    for index in range(packs.num_sequences):
        begins = packs.begins[packs.pieces(index)] // (look_ahead * seq_len)
        assert len(set(begins.tolist())) == 1


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    """The longest first: 6 fills up the 10, and 3 the 13, though the 12 has room for it."""
    lengths = [3, 12, 6, 13, 10]
    packs = best_fit(_ends(lengths), num_tokens=sum(lengths), seq_len=16)
    found = [packs.lengths[packs.pieces(index)].tolist() for index in range(packs.num_sequences)]
    assert found == [[3, 13], [12], [6, 10]]


def test_best_fit_is_dense_where_documents_are_short() -> None:
    rng = np.random.default_rng(2)
    sizes = np.clip(rng.lognormal(8.0, 1.1, 20_000), 32, 131_072).astype(np.int64)
    packs = best_fit(np.cumsum(sizes) - 1, num_tokens=int(sizes.sum()), seq_len=131_072)
    assert packs.density > 0.995


def _data(tmp_path: Path, count: int = 60) -> Path:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(count):
        (corpus / f"{i:03}.txt").write_text(f"document {i} " * (1 + 7 * i % 23))
    prepare(tmp_path / "data", paths=[str(corpus)], tokenizer=BYTES, eval_fraction=0.2)
    return tmp_path / "data"


def _open(folder: Path, packing: str, seed: int | None = 0) -> Dataset:
    return Dataset.open(folder, "train", seq_len=64, seed=seed, packing=packing)  # type: ignore[arg-type]


def test_padding_is_learned_from_nowhere_and_every_other_token_as_in_its_document(
    tmp_path: Path,
) -> None:
    data = _open(_data(tmp_path), "best_fit", seed=None)
    stream = _open(tmp_path / "data", "stream", seed=None)
    separator = data.separator
    whole = data.tokens[0 : data.tokens.size].astype(np.int64)
    batch = data.batch(range(data.num_sequences))
    assert batch.padding is not None
    assert (batch.targets[batch.padding] == -1).all()
    assert set(batch.tokens[batch.padding].tolist()) == {separator}
    # Every token but separators has its successor as target, once in a pass over the split.
    want = sorted((int(a), int(b)) for a, b in itertools.pairwise(whole.tolist()) if a != separator)
    found = batch.targets >= 0
    pairs = zip(batch.tokens[found].tolist(), batch.targets[found].tolist(), strict=True)
    assert sorted(pairs) == want
    assert int((~batch.padding).sum()) == whole.size
    for documents in batch.documents:
        assert sum(documents) == 64
    assert stream.batch(range(3)).padding is None


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_targets_are_counted_without_reading_them(tmp_path: Path, ahead: int) -> None:
    data = _open(_data(tmp_path), "best_fit")
    part = range(data.num_sequences - 3, data.num_sequences + 5)  # from one pass into the next
    batch = data.batch(part)
    aims = (
        batch.targets
        if not ahead
        else look_ahead(batch.tokens, batch.targets, (0,) * ahead).targets[-1]
    )
    assert data.num_targets(part, ahead=ahead) == int((aims >= 0).sum())


def test_another_packing_is_other_data_by_its_digest(tmp_path: Path) -> None:
    folder = _data(tmp_path)
    packed, stream = _open(folder, "best_fit"), _open(folder, "stream")
    assert packed.digest != stream.digest


def test_packing_reads_no_damaged_token(tmp_path: Path) -> None:
    folder = _data(tmp_path)
    raw = bytearray((folder / "train.bin").read_bytes())
    raw[100] ^= 1
    (folder / "train.bin").write_bytes(raw)
    with pytest.raises(DataError, match="is not what was written"):
        _open(folder, "best_fit")


def test_whole_documents_need_to_be_separate() -> None:
    config = Config(data=DataConfig(packing="best_fit", documents="joined"))
    with pytest.raises(ConfigError, match=r"data\.documents"):
        rules.check(config)


@pytest.mark.parametrize(
    ("mesh", "others", "message"),
    [
        ({"cp": 2}, {}, "mesh.cp_deal (true) must be false"),
        ({"cp": 2, "cp_heads": 1}, {"train.microbatch_size": 2}, "train.microbatch_size (2)"),
        ({"cp": 2, "cp_ring": True}, {"data.documents": "joined"}, "data.documents"),
    ],
)
def test_documents_are_dealt_out_one_sequence_after_the_other(
    mesh: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    config = Config(mesh=MeshConfig(cp_deal=True, **mesh))
    plain = {"train.microbatch_size": 1, "train.global_batch_size": 8}
    rules.check(with_keys(config, plain | {"mesh.cp_heads": 1}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        rules.check(with_keys(config, plain | others))
