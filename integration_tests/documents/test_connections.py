"""SECURITY.md lists every module that could talk to another program, and there is no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = re.compile(
    r"socket|ssl|socketserver|http|urllib\.request|ftplib|smtplib|poplib|imaplib|nntplib|telnetlib"
    r"|xmlrpc|asyncio|webbrowser|multiprocessing\.(connection|managers)|requests|httpx\d?|aiohttp"
    r"|urllib3|websockets?|grpc|zmq|paramiko|huggingface_hub|wandb|mlflow|sentry_sdk|boto3"
    r"|torch\.(hub|distributed\.rpc)"
)
NAMES = {"TCPStore", "create_server", "create_connection", "urlopen", "load_state_dict_from_url"}
PROGRAMS = re.compile(r"curl|wget|ssh|scp|rsync|nc|git")
LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.Call, ast.List, ast.Tuple)
ROW = re.compile(r"^\| `(hp_[\w/]+\.py)` \| (.*?) \| .* \|$", re.MULTILINE)


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that an import may bring in."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)


def connecting(source: str) -> set[str]:
    """Return what a module uses by which a program can connect to another."""
    found: set[str] = set()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOOKED_AT)]
    for node in nodes:
        for name in imported(node):
            known = [m[0] for m in [re.match(rf"(?:{MODULES.pattern})(?=\.|$)", name)] if m]
            found |= {*known} | ({name.rpartition(".")[2]} & NAMES)
        match node:
            case ast.Attribute(attr=str(name)) | ast.Name(id=str(name)) if name in NAMES:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="from_pretrained"), keywords=keywords):
                given = {k.arg: k.value for k in keywords}
                match given.get("local_files_only"):
                    case ast.Constant(value=True):
                        pass
                    case _:
                        found.add("from_pretrained")
            case (
                ast.List(elts=[ast.Constant(value=str(program)), *_])
                | ast.Tuple(elts=[ast.Constant(value=str(program)), *_])
            ) if PROGRAMS.fullmatch(program):
                found.add(program)
    return found


def test_the_page_lists_all_that_could_connect_and_nothing_else() -> None:
    listed = {
        file: {*re.findall(r"`([\w.]+)`", names)}
        for file, names in ROW.findall((ROOT / "SECURITY.md").read_text())
    }
    found: dict[str, set[str]] = {}
    for source in ROOT.glob("packages/*/src"):
        for file in source.rglob("*.py"):
            # Functions of a module that is listed itself.
            names = connecting(file.read_text()) - {"create_server", "create_connection"}
            if names:
                found[str(file.relative_to(source))] = names
    assert len(found) > 5
    assert found == listed


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import socket", "socket"),
        ("import http.client as c", "http"),
        ("from urllib import request", "urllib.request"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("def f():\n    import requests", "requests"),
        ("from torch.distributed import TCPStore", "TCPStore"),
        ("import torch\ntorch.distributed.TCPStore('h', 1)", "TCPStore"),
        ("from torch import hub", "torch.hub"),
        ("AutoModel.from_pretrained(name)", "from_pretrained"),
        ("AutoModel.from_pretrained(name, local_files_only=False)", "from_pretrained"),
        ("subprocess.run(['curl', address])", "curl"),
    ],
)
def test_what_could_connect_is_seen(source: str, name: str) -> None:
    assert name in connecting(source)


def test_what_could_not_is_passed_over() -> None:
    source = (
        "from urllib.parse import quote\nimport multiprocessing\nimport torch.distributed as dist\n"
        "AutoConfig.from_pretrained(folder, local_files_only=True)\n['git log']\n"
    )
    assert connecting(source) == set()
