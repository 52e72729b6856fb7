"""Tiny models of the causal architectures of transformers, or of a folder with its own code."""

import hashlib
import inspect
import json
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hp_train import __version__
from integration_tests.models.architectures import forks
from integration_tests.models.architectures.overrides import OVERRIDES
from integration_tests.models.architectures.shrinking import shrunk

SPREAD = 0.05
"""Of what is added to first weights: none stays a constant that hides a mistake."""


def names() -> list[str]:
    """Types of all causal language models that the installed transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def versions() -> dict[str, str]:
    """What a result depends on."""
    return {
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "hp-train": __version__,
    }


def prepare() -> None:
    """Have once what all runs of models need, before any of them is forked."""
    get_checkpoint_conversion_mapping("llama")  # it keeps those of all models
    transformers.logging.set_verbosity_error()
    forks.prepare()


def fields_of(name: str) -> dict[str, Any]:
    """Fields of a tiny config of a model's type."""
    default = transformers.AutoConfig.for_model(name).to_dict()
    return _merged(shrunk(default), OVERRIDES.get(name, {}))


def _merged(fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(fields)
    for key, value in more.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            value = _merged(known, value)  # noqa: PLW2901
        result[key] = value
    return result


class Tiny:
    """How to make a tiny model of an architecture.

    Args:
        name: Its type in transformers; or a folder with `config.json` and code of its own, which is
            then run.
    """

    def __init__(self, name: str) -> None:
        self.code = Path(name) if (Path(name) / "config.json").is_file() else None
        self.name = name if self.code is None else self.code.resolve().name

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Fields of its config that the rule or `OVERRIDES` decide."""
        if self.code is None:
            return fields_of(self.name)
        return shrunk(self._default.to_dict())

    @cached_property
    def config(self) -> Any:
        """Its config.

        Raises:
            Exception: Whatever a config refuses.
        """
        if self.code is None:
            return transformers.AutoConfig.for_model(self.name, **self.fields)
        default = self._default
        return type(default)(**{**default.to_dict(), **self.fields})

    @cached_property
    def _default(self) -> Any:
        return transformers.AutoConfig.from_pretrained(self.code, trust_remote_code=True)

    def load_code(self) -> None:
        """Import the code of the model, so that processes forked from this one have it."""
        if self.code is None:
            _ = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]

    @property
    def digest(self) -> str:
        """Stands for fields and files of the code, which a new release may have changed."""
        if self.code is not None:
            files = sorted(self.code.glob("*.py"))
        else:
            model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
            code = {inspect.getfile(kind) for kind in (type(self.config), model)}
            files = sorted(map(Path, code))
        fields = json.dumps(self.fields, sort_keys=True, default=str)
        hasher = hashlib.blake2b(fields.encode(), digest_size=8)
        for file in files:
            hasher.update(file.name.encode() + b"\0" + file.read_bytes())
        return hasher.hexdigest()

    def make(self, folder: Path) -> Any:
        """Write the model with random weights in float64 that float32 has as well, and return it.

        Args:
            folder: Folder to be made.
        """
        torch.manual_seed(0)
        trusted = {} if self.code is None else {"trust_remote_code": True}
        model = transformers.AutoModelForCausalLM.from_config(self.config, **trusted).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
                # Some models make parameters in float32, whatever is asked for.
                parameter.copy_(parameter.float())
        model.save_pretrained(folder)
        if type(model.config) is not type(self.config):  # a part of it, of which nothing is known
            self.config.save_pretrained(folder)
        if self.code is not None:
            self._add_code(folder)
        return model

    def _add_code(self, folder: Path) -> None:
        assert self.code is not None
        for file in self.code.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
        path = folder / "config.json"
        auto_map = json.loads((self.code / "config.json").read_text())["auto_map"]
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
