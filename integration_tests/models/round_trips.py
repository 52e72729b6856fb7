"""Folders of models with all that people put there: tokenizers of every kind, odd keys and files.

A round trip imports one, exports it before and after a step, and compares what came out.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor

from hp_trainer.model.transformer import model_tensors
from hp_transformers.families import model_config, read_config
from hp_transformers.families.plan import stored_tensors
from hp_transformers.families.published import FAMILIES

VOCAB, MOST, EOS_ID = 480, 24, 2
EOS = {"byte-level": "<|endoftext|>", "sentencepiece": "</s>", "wordpiece": "[SEP]"}
_TEXT = [
    f"{i} squared is {i * i}, and cubed {i**3}. The quick brown fox; été, "
    "\N{GREEK SMALL LETTER ALPHA}\N{CJK UNIFIED IDEOGRAPH-4E2D}!\n\tdef f(x): return x"
    for i in range(60)
]
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
_MORE = ("<|im_start|>", "<|im_end|>", "<think>")


def _gpt2() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _trained(made, trainers.BpeTrainer, "byte-level")


def _llama3() -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made = _trained(made, trainers.BpeTrainer, "byte-level")
    bos = ("<|im_start|>", made.token_to_id("<|im_start|>"))
    made.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return made


def _qwen() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return _trained(made, trainers.BpeTrainer, "byte-level")


def _llama2() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(space), normalizers.Replace(" ", space)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return _trained(made, trainers.BpeTrainer, "sentencepiece", *_BYTES)


def _gemma() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    made.normalizer = normalizers.Replace(" ", space)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _trained(made, trainers.BpeTrainer, "sentencepiece", *_BYTES)


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _trained(made, trainers.UnigramTrainer, "sentencepiece")


def _bert(*, lowercase: bool) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return _trained(made, trainers.WordPieceTrainer, "wordpiece", "[UNK]", "[CLS]", "[MASK]")


_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TOKENIZERS: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
    "gpt2": ("byte-level", _gpt2),
    "llama3": ("byte-level", _llama3),
    "qwen": ("byte-level", _qwen),
    "llama2": ("sentencepiece", _llama2),
    "gemma": ("sentencepiece", _gemma),
    "unigram": ("sentencepiece", _unigram),
    "bert": ("wordpiece", lambda: _bert(lowercase=True)),
    "bert-cased": ("wordpiece", lambda: _bert(lowercase=False)),
}
"""Name -> kind, and what makes it."""


def _trained(made: Tokenizer, trainer: Any, kind: str, *more: str) -> Tokenizer:
    special = ["<unk>", "<s>", EOS[kind], "<pad>", *more]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else []
    given = {"unk_token": "<unk>"} if trainer is trainers.UnigramTrainer else {}
    made.train_from_iterator(
        _TEXT,
        trainer(
            vocab_size=VOCAB - len(_MORE),
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
            **given,
        ),
    )
    made.add_special_tokens([AddedToken(text, special=True) for text in _MORE[:2]])
    made.add_tokens([AddedToken(_MORE[2], special=False)])
    return made


def write_tokenizer(name: str, folder: Path) -> None:
    """Write a tokenizer as transformers does, with a chat template and what old versions wrote."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - who has it

    kind, make = TOKENIZERS[name]
    made = make()
    special = {"unk_token": "[UNK]" if kind == "wordpiece" else "<unk>"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template={"default": _TEMPLATE, "tool_use": f"tools {_TEMPLATE}"},
        model_max_length=512,
        **special,
    )
    wrapped.save_pretrained(folder)
    ids = {text: made.token_to_id(text) for text in _MORE}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    texts = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(texts))
    vocab = {k: v for k, v in made.get_vocab().items() if k not in ids}
    if kind == "wordpiece":
        (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=lambda t: vocab[t])))
    elif kind == "byte-level":
        (folder / "vocab.json").write_text(json.dumps(vocab))
        merges = json.loads(made.to_str())["model"]["merges"]
        lines = (" ".join(pair) for pair in merges)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    else:
        (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 4)


def write_others(folder: Path) -> None:
    """Write what else stands in folders of models."""
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.png").write_bytes(b"\x89PNG\r\n" + bytes(range(256)))
    (folder / "modeling_extra.py").write_text("raise SystemExit('run')\n")


def add_settings(folder: Path, **keys: Any) -> None:
    """Add to a `config.json` what no model reads, and special tokens."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values |= {
        "id2label": {"0": "no", "1": "yes"},
        "label2id": {"no": 0, "yes": 1},
        "a_key_of_mine": {"deep": [1, 2.5, None, "\N{SNOWMAN}"]},
        "_name_or_path": "somebody/something",
        "use_cache": True,
        "bos_token_id": 1,
        "pad_token_id": 3,
        **keys,
    }
    path.write_text(json.dumps(values, indent=4))


def strings(seed: int = 0, count: int = 1000) -> Iterator[str]:
    """Texts that tokenizers disagree about: special tokens, spaces, digits, scripts, joiners."""
    draw = random.Random(seed)
    pieces = (
        *(
            "<|im_start|>",
            "<|im_end|>",
            "<|endoftext|>",
            "<think>",
            "<s>",
            "</s>",
            "[SEP]",
            "<pad>",
        ),
        *(" ", "  ", "\t", "\n", "\n\n  ", "\r\n", "\N{NO-BREAK SPACE}", "\N{EM SPACE}"),
        *("0", "7", "42", "1234567", "3.14", "1,000", "\N{ARABIC-INDIC DIGIT THREE}"),
        *("the", "The", "fox", "squared", "don't", "f(x)", "==", "!!!", "_", "\\", "<0x41>"),
        *("e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{ROCKET}"),
        *("\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{HEBREW LETTER ALEF}", "\N{ZERO WIDTH JOINER}"),
        *("\N{LOWER ONE EIGHTH BLOCK}", "\0", "\N{REPLACEMENT CHARACTER}"),
    )
    yield ""
    for _ in range(count - 1):
        yield "".join(draw.choice(pieces) for _ in range(draw.randint(1, 12)))


def ids_of(folder: Path) -> list[list[int]]:
    """What `AutoTokenizer` makes of all strings, with and without special tokens around them."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - who has it

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [*strings()]
    found: list[list[int]] = tokenizer(texts).input_ids
    alone: list[list[int]] = tokenizer(texts, add_special_tokens=False).input_ids
    return found + alone


def generated(folder: Path, *, eos: object = ...) -> list[list[int]]:
    """Greedy continuations of some prompts, each until it stops by itself, at most 24 tokens."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - who has it

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    given = {} if eos is ... else {"eos_token_id": eos}
    found = []
    for prompt in ([5, 6, 7], [20, 300], [1]):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=MOST, do_sample=False, **given
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def _starts(vocab: int, model: Any) -> None:
    """Spread weights, so that a continuation is no repetition of one token."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32) * 0.3)
    assert model.config.get_text_config().vocab_size == vocab


def add_prediction(tensors: dict[str, Tensor], folder: Path) -> None:
    """Add what published files of DeepSeek-V3 have and transformers leaves out."""
    model = model_config(read_config(folder))
    ours = model_tensors(model)
    for stored in stored_tensors(ours, model, FAMILIES["deepseek_v3"]):
        if stored.name.endswith("embed_tokens.weight"):
            value = tensors["model.embed_tokens.weight"].clone()
        elif stored.name.endswith("shared_head.head.weight"):
            value = tensors["lm_head.weight"].clone()
        else:
            value = torch.randn(stored.shape) * 0.1
        is_bias = stored.name.endswith("correction_bias")
        value = value.to(torch.float32 if is_bias else torch.bfloat16)
        if is_bias or stored.name not in tensors:
            tensors[stored.name] = value


def keep_norms(tensors: dict[str, Tensor], _folder: Path) -> None:
    """Have norms in float32, between what half the digits can say."""
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)


def repeat_embedding(tensors: dict[str, Tensor], _folder: Path) -> None:
    """Have the output matrix in the files as well, though it is the embedding."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def write_model(
    type_of: str,
    folder: Path,
    *,
    dtype: str,
    tokenizer: str,
    shard_bytes: int = 10**9,
    change: Callable[[dict[str, Tensor], Path], None] | None = None,
    **fields: Any,
) -> None:
    """Write a model with everything, of which a continuation ends at a token of its own.

    Args:
        type_of: Type of the model.
        folder: Where it is written.
        dtype: Dtype of its files.
        tokenizer: One of `TOKENIZERS`.
        shard_bytes: Largest size of a file of weights.
        change: Changes the tensors of its only file.
        **fields: Fields of its config, besides those that all have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - who has it

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(type_of, **{**common, **fields})
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    _starts(VOCAB, model)
    config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors, folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(tokenizer, folder)
    write_others(folder)
    add_settings(folder, eos_token_id=EOS_ID)
    first, *_ = generated(folder, eos=VOCAB + 5)
    stop = next(token for token in first[2:] if token not in (0, 1, EOS_ID))
    generation = {"eos_token_id": [stop, EOS_ID], "bos_token_id": 1, "pad_token_id": 3}
    more = {"temperature": 0.7, "top_p": 0.9, "do_sample": True, "a_key_of_mine": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation | more))
