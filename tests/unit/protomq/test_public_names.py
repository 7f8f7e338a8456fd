"""`protomq.__all__`, the lazy table and what is there agree; the import stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import protomq
from protomq import _remoting_hello, errors

SDK = Path(protomq.__file__).parent


def test_every_public_name_exists() -> None:
    missing = [name for name in protomq.__all__ if not hasattr(protomq, name)]
    assert missing == []


def test_all_lazy_table_and_type_checking_imports_agree() -> None:
    tree = ast.parse((SDK / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = set(protomq._LAZY) | {"errors"}
    assert typed == lazy
    assert set(protomq.__all__) == lazy | {"__version__"}
    assert len(protomq.__all__) == len(set(protomq.__all__))


def test_a_public_object_says_where_it_is_public() -> None:
    for name, module in protomq._LAZY.items():
        assert getattr(protomq, name).__name__ == name
        assert getattr(protomq, name).__module__ == f"protomq.{module}"


def test_errors_all_is_complete() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ProtomqError)
    }
    assert classes | {"error_from_status"} == set(errors.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(protomq, "Prodcer")


def test_versions_agree() -> None:
    project = tomllib.loads((SDK.parent / "pyproject.toml").read_text())["project"]
    assert protomq.__version__ == _remoting_hello.VERSION == project["version"]


def test_import_loads_no_heavy_module() -> None:
    code = "import sys, protomq; print([m for m in ('grpc', 'google.protobuf', 'numpy', 'asyncio', 'tenacity') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_the_consumer_loads_no_grpc() -> None:
    code = (
        "import sys; from protomq import PullConsumer; PullConsumer(); print('grpc' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"
