"""Mutants of folders of models: what `hp` makes of them is what transformers does, or a refusal.

A program of its own, which needs transformers:

    python -m integration_tests.reliability.folders COUNT SEED [--results FILE]

With a file it goes on where it was stopped.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hp_base.errors import HpError
from hp_checkpoint import Part
from hp_train.cli import main
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.model import Microbatch, TransformerStage
from hp_transformers.families import load_weights
from hp_transformers.stages.conversion import first_names, saved_tensors
from hp_transformers.stages.load import load_folder
from hp_transformers.stages.model import on_meta
from integration_tests.reliability.folder_changes import CHANGES, Good
from integration_tests.reliability.outcome import Outcome
from integration_tests.reliability.strangers import run_program, tell

_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_local_experts": 8}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
_NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_TIED = {"tie_word_embeddings": True}
# The type of each model, and what its config is given; of families first, then of transformers.
IMPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", _TIED),
    "qwen3": ("qwen3", {"head_dim": 6}),
    "qwen3_moe, tied": ("qwen3_moe", _EXPERTS | _TIED),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers: gemma3_text": ("gemma3_text", {"head_dim": 8}),
    "transformers: gpt2": ("gpt2", _NO_DROPOUT),
    "transformers: gpt_neox": ("gpt_neox", {}),
    "transformers: llama": ("llama", {}),
    "transformers: mixtral": ("mixtral", {"num_local_experts": 4}),
    "transformers: deepseek_v3": ("deepseek_v3", _DEEPSEEK | _TIED),
}
_BOUND = 1e-4  # of logits in float32; other weights give 1e-2 and more
_LENGTH = 12
_GOOD = ("equal", "refused", "stricter")
_STRICT = "StrictDataclass"
"""How errors of transformers' configs begin, about types and bounds of keys that decide nothing."""
_IDS = 16
_SHOWN = 300


class Met(NamedTuple):
    """What became of a mutant.

    Attributes:
        what: Names it.
        verdict: equal, refused, stricter (transformers refuses a value that decides nothing), or
            what went wrong.
        told: The refusal, or the difference.
    """

    what: str
    verdict: str
    told: str


def run(count: int, *, seed: int) -> Outcome:
    """Run the program of this module."""
    return run_program(__name__, "model folders", count, seed=seed)


def make(name: str, folder: Path) -> Path:
    """Write a good model."""
    import transformers  # noqa: PLC0415 - of those who have it

    kind, fields = (IMPORTED | OTHERS)[name]
    config = transformers.AutoConfig.for_model(kind, **(_SIZES | fields))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def meet(name: str, kind: str, good: Good, *, number: str) -> Met:
    """Make a mutant, and compare what both read of it.

    Args:
        name: Name of the good model.
        kind: Kind of change.
        good: The model.
        number: With the others, decides what is drawn.
    """
    random = Random(f"{number} {name} {kind}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        what = f"{name}: {kind} {number}: {CHANGES[kind](folder, good, random)}"
        tokens = torch.randint(1, _IDS, (2, _LENGTH), generator=torch.Generator().manual_seed(1))
        reads: Callable[[Path, Tensor], Tensor | str] = (
            imported if name in IMPORTED else of_transformers
        )
        try:
            ours = reads(folder, tokens)
        except HpError as refusal:
            return Met(what, "refused" if "\n" not in str(refusal) else "lines", str(refusal))
        except Exception as error:  # noqa: BLE001 - whatever is no line of ours
            return Met(what, "traceback", f"{type(error).__name__}: {error}"[:_SHOWN])
        try:
            theirs = plainly(folder, tokens)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises
            is_strict = type(error).__name__.startswith(_STRICT)
            verdict = "stricter" if is_strict else "taken, where transformers fails"
            return Met(what, verdict, f"{error}"[:_SHOWN])
        return Met(what, *_verdict(ours, theirs))


def _verdict(ours: Tensor | str, theirs: Tensor | str) -> tuple[str, str]:
    """Compare logits, or what a forward has raised."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return ("equal" if ours == theirs else "different"), f"{ours} against {theirs}"[:_SHOWN]
    if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
        return "different", f"{[*ours.shape]} against {[*theirs.shape]}"
    apart = float((ours - theirs).nan_to_num().abs().max() / theirs.nan_to_num(1.0).abs().max())
    return ("equal" if apart <= _BOUND else "different"), f"{apart:.1e}"


def imported(folder: Path, tokens: Tensor) -> Tensor:
    """Logits of a folder by `hp import-hf` and what a run then reads."""
    out = folder.with_name("config.toml")
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = main(["import-hf", str(folder), "--out", str(out)])
    if status:
        raise HpError(told.getvalue().strip())
    model = resolve(str(out), env={}).config.model
    with torch.device("meta"):
        stage = TransformerStage(
            model,
            model.vocab_size,
            layers=range(model.num_layers),
            first=True,
            last=True,
            compute_dtype=torch.float32,
        )
    stage = stage.float().to_empty(device="cpu")
    named = [*stage.named_parameters(), *stage.named_buffers()]
    load_weights(folder, {name: tensor.detach() for name, tensor in named})
    with torch.no_grad():
        logits: Tensor = stage(tokens, microbatch=Microbatch(2))
    return logits


def of_transformers(folder: Path, tokens: Tensor) -> Tensor | str:
    """Logits of a folder by `model.transformers`, or what the model's forward raises."""
    import transformers  # noqa: PLC0415 - of those who have it

    keys = {"model.transformers": str(folder), "data.seq_len": _LENGTH}
    model = resolve(None, keys.items(), env={}).config.model
    on_meta(model, torch.float32)  # which a stage is made of
    config = transformers.AutoConfig.from_pretrained(folder)
    made = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    _load(model, made)
    return _logits(made, tokens)


def _load(model: ModelConfig, made: nn.Module) -> None:
    names = first_names(made)
    parts = {names.get(n, n): Part.of(t.detach()) for n, t in saved_tensors(made).items()}
    for part in parts.values():
        part.local.fill_(torch.nan)
    load_folder(model, parts)


def plainly(folder: Path, tokens: Tensor) -> Tensor | str:
    """Logits of a folder by transformers, or what the model's forward raises."""
    import transformers  # noqa: PLC0415 - of those who have it

    return _logits(
        transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        ),
        tokens,
    )


def _logits(model: Any, tokens: Tensor) -> Tensor | str:
    try:
        with torch.no_grad():
            logits: Tensor = model.eval()(tokens, use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - numbers that its config lets pass
        return f"{type(error).__name__}: {error}"
    return logits


def draw(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Name mutants: models, kinds of change and numbers, each pair of the first two as often."""
    pairs = [(name, kind) for name in IMPORTED | OTHERS for kind in CHANGES]
    Random(seed).shuffle(pairs)
    return [(*pairs[i % len(pairs)], f"{seed}.{i // len(pairs)}") for i in range(count)]


def meet_all(drawn: list[tuple[str, str, str]], results: Path | None) -> list[Met]:
    """Meet mutants that a file does not know yet, and add them to it."""
    known: dict[str, Met] = {}
    if results is not None and results.exists():
        rows = map(json.loads, results.read_text().splitlines())
        known = {row["mutant"]: Met(*row["met"]) for row in rows}
    with tempfile.TemporaryDirectory() as temporary:
        goods: dict[str, Good] = {}
        for name, kind, number in drawn:
            if (key := f"{name} {kind} {number}") in known:
                continue
            if name not in goods:
                goods[name] = Good.of(make(name, Path(temporary) / name))
            known[key] = meet(name, kind, goods[name], number=number)
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps({"mutant": key, "met": known[key]}) + "\n")
    return [known[f"{name} {kind} {number}"] for name, kind, number in drawn]


def failures_of(met: list[Met]) -> list[str]:
    """Mutants that are neither equal nor refused in a line."""
    return [
        f"{m.verdict}: {m.what}: {m.told}" for m in met if m.verdict not in ("equal", "refused")
    ]


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    import transformers  # noqa: PLC0415 - of those who have it

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    met = meet_all(draw(options.count, options.seed), options.results)
    counts = Counter(m.verdict for m in met)
    tell(len(met), failures_of(met), [", ".join(f"{n} {v}" for v, n in sorted(counts.items()))])
    return 0


if __name__ == "__main__":
    sys.exit(_main())
