"""What a machine can judge: directions and circles of imports, clocks and randomness in their place, no print, no stray threads."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "protomq": ROOT / "clients/python/protomq",
    "protomq_runtime": ROOT / "services/runtime/protomq_runtime",
    "protomq_namesrv": ROOT / "services/namesrv/protomq_namesrv",
    "protomq_broker": ROOT / "services/broker/protomq_broker",
    "protomq_spark": ROOT / "clients/spark/protomq_spark",
    "protomq_cli": ROOT / "cli/protomq_cli",
}
STORE = PACKAGES["protomq_broker"] / "store"

MAY_IMPORT = {
    "protomq": {"protomq"},
    "protomq_runtime": {"protomq_runtime", "protomq"},
    "protomq_namesrv": {"protomq_namesrv", "protomq_runtime", "protomq"},
    "protomq_broker": {"protomq_broker", "protomq_runtime", "protomq"},
    "protomq_spark": {"protomq_spark", "protomq"},
    "protomq_cli": set(PACKAGES),
}
SDK_MODULES_FOR_SERVERS = ("protomq.v1", "protomq.wire")
"""What a server may use of the SDK: stubs and bytes, no client."""


def files_of(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*.py") if "v1" not in path.relative_to(folder).parts
    )


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of imported modules; relative ones are in their own package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def is_under(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    for path in files_of(PACKAGES[package]):
        for module in imports_of(path):
            top = module.partition(".")[0]
            if top not in PACKAGES:
                continue
            if package == "protomq" and path.name in ("__main__.py",):
                continue  # hands over to the command line where that is installed
            if package == "protomq" and path.name == "simdisk.py" and top == "protomq_broker":
                continue  # a fake of the broker's disk, for tests of the broker; imported late
            assert top in MAY_IMPORT[package], f"{path}: imports {module}"
            if (
                top == "protomq"
                and package not in ("protomq", "protomq_spark", "protomq_cli")
                and module != "protomq"
            ):
                assert is_under(module, SDK_MODULES_FOR_SERVERS), (
                    f"{path}: a server imports {module} of the SDK"
                )


def modules_of(package: str) -> dict[str, Path]:
    """By absolute name; a package stands for its `__init__.py`."""
    folder = PACKAGES[package]
    modules = {}
    for path in files_of(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        modules[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return modules


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those of a module outside its functions: what `if TYPE_CHECKING` guards belongs to them, what a function imports late does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from import_statements(node)


def imported_modules(
    name: str, source: str, is_package: bool, modules: Collection[str]
) -> set[str]:
    """Those of `modules` that the module imports, by relative or absolute names."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    found: set[str] = set()
    for node in import_statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        parents = package[: len(package) - node.level + 1] if node.level else []
        origin = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{origin}.{alias.name}"
            found.add(submodule if submodule in modules else origin)
    return found & set(modules) - {name}


def cycle_in(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first and the last the same; empty if there is no such circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    modules = modules_of(package)
    imports = {
        name: imported_modules(name, path.read_text(), path.name == "__init__.py", modules)
        for name, path in modules.items()
    }
    assert any(imports.values()), "the graph has no edges: the finder sees nothing"
    assert not cycle_in(imports), " <- ".join(cycle_in(imports))


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"p.a": "from .b import x", "p.b": "from p import a"}, {"p.a", "p.b"}),
        ({"p.a": "from . import b", "p.b": "if TYPE_CHECKING:\n    from .a import y"}, {"p.a", "p.b"}),
        ({"p.a": "import p.b", "p.b": "from .c import z", "p.c": "from .a import y"}, {"p.a", "p.b", "p.c"}),
        ({"p.a": "from .b import x", "p.b": "def f():\n    from .a import y"}, set()),
        ({"p.a": "from .b import x", "p.b": "import os"}, set()),
    ],
)  # fmt: skip
def test_a_circle_of_imports_is_found(sources: dict[str, str], expected: set[str]) -> None:
    imports = {
        name: imported_modules(name, source, False, sources) for name, source in sources.items()
    }
    assert set(cycle_in(imports)) == expected


def test_the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime() -> None:
    for path in files_of(STORE):
        for module in imports_of(path):
            assert not is_under(module, ("grpc", "asyncio", "protomq_runtime")), (
                f"{path}: imports {module}"
            )
        tree = ast.parse(path.read_text())
        assert not any(
            isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree)
        ), path


STORE_LAYERS = ("files", "log", "queues", "index", "timer", "state", "", "tools")
"""The folders of the store, lowest first; "" is what joins them: the modules beside the folders."""
STORE_VALUES = ("errors", "config")
"""Modules beside the folders that any layer may use."""


def layers_imported_by(path: Path) -> Iterator[str]:
    """The layers of the store of which a module of it imports something."""
    folder = path.relative_to(STORE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = (node.module or "").split(".") if node.module else [a.name for a in node.names]
        if node.level == 1:
            names = [*folder, *names]
        elif names[:2] == ["protomq_broker", "store"]:
            names = names[2:] or [alias.name for alias in node.names]
        else:
            continue
        if names[0] not in STORE_VALUES:
            yield names[0] if names[0] in STORE_LAYERS else ""


def test_the_layers_of_the_store_point_one_way() -> None:
    for path in files_of(STORE):
        own = path.relative_to(STORE).parts[0] if path.parent != STORE else ""
        for layer in layers_imported_by(path):
            assert STORE_LAYERS.index(layer) <= STORE_LAYERS.index(own), (
                f"{path}: imports of {layer or 'the store'!r}, which stands above it"
            )


def test_the_store_reads_no_clock_and_no_randomness() -> None:
    for path in files_of(STORE):
        for module in imports_of(path):
            assert not is_under(module, ("random", "secrets", "uuid", "datetime")), (
                f"{path}: imports {module}"
            )
        for call in calls_of(path):
            if call.startswith("time."):
                assert call == "time.localtime", (
                    f"{path}: calls {call}"
                )  # of a time that was handed in


def test_services_start_no_other_programs_and_load_nothing_by_name() -> None:
    for package in ("protomq_runtime", "protomq_namesrv", "protomq_broker"):
        for path in files_of(PACKAGES[package]):
            for module in imports_of(path):
                assert not is_under(module, ("subprocess", "pickle", "marshal", "shelve")), (
                    f"{path}: imports {module}"
                )
            for call in calls_of(path):
                assert call not in ("eval", "exec", "os.system", "yaml.load", "os.popen"), (
                    f"{path}: calls {call}"
                )


def test_libraries_and_services_do_not_print() -> None:
    for package in ("protomq", "protomq_runtime", "protomq_namesrv", "protomq_broker"):
        for path in files_of(PACKAGES[package]):
            if path.name == "__main__.py":
                continue
            assert "print" not in set(calls_of(path)), f"{path}: prints"


def test_importing_the_sdk_does_not_import_grpc() -> None:
    code = "import sys, protomq; protomq.Producer, protomq.PullConsumer; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
