"""The oracle of hp verify stands on torch and the standard library alone."""

import ast
import importlib.util
import sys
from pathlib import Path

import torch

import hp_train

PATH = Path(hp_train.__file__).parent / "verify" / "oracle.py"


def test_the_oracle_imports_nothing_but_torch_and_the_standard_library() -> None:
    imported = set()
    for node in ast.walk(ast.parse(PATH.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported <= {"torch", *sys.stdlib_module_names}


def test_a_dense_layer_by_hand() -> None:
    """One head, one layer of zeros: the logits of a token are products with its normed row."""
    spec = importlib.util.spec_from_file_location("oracle_alone", PATH)
    assert spec is not None
    assert spec.loader is not None
    oracle = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = oracle
    spec.loader.exec_module(oracle)
    dim, vocabulary = 4, 3
    model: dict[str, object] = dict.fromkeys(
        ("num_mtp_modules", "num_experts", "head_dim", "qk_norm", "dropout", "sliding_window"), 0
    )
    model |= {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "dim": dim, "norm_eps": 0.0}
    model |= {"full_attention_every": 0, "num_dense_layers": 1, "tie_embeddings": True}
    names = {"attention": "gqa", "rope_scaling": "none", "rope_pairs": "halves"}
    rope = {"rope_theta": 10.0, "rope_factor": 1.0, "rope_original_positions": 8}
    tables = {"model": {**model, **names, **rope}, "train": {}, "run": {"seed": 0}}
    table = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [2, 0, 0, 0]], dtype=torch.float64)
    weights = {"embedding.weight": table, "norm.weight": torch.ones(dim)}
    for name in ("attention.wq", "attention.wk", "attention.wv", "attention.wo"):
        weights[f"layers.0.{name}.weight"] = torch.zeros(dim, dim)
    for name in ("w1", "w2", "w3"):
        weights[f"layers.0.feed_forward.{name}.weight"] = torch.zeros(dim, dim)
    for name in ("attention_norm", "feed_forward_norm"):
        weights[f"layers.0.{name}.weight"] = torch.ones(dim)
    alone = oracle.Oracle(tables, weights, separator=2)
    # Tokens 0, 1 and 2 predict 1, 2 and nothing, as 2 ends a document.
    loss = alone.evaluate(torch.tensor([[0, 1, 2, 0]]))
    rows = table / table.square().mean(1, keepdim=True).sqrt()
    chances = (rows @ table.T).log_softmax(-1)
    assert abs(loss + (chances[0, 1] + chances[1, 2]).item() / 2) < 1e-15
    assert vocabulary == len(table)
    assert alone.aims(torch.tensor([[0, 1, 2, 0]]))[0].tolist() == [[1, 2, -1]]
    assert alone.aims(torch.tensor([[0, 1, 0, 1]]), (1,))[0].tolist() == [[0, 1, -1]]
