"""The dependency rules of the design, checked by reading imports and by really importing without packages."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "worker", "kvstore")
OWN = ("services", "shared", "deploy")
MAX_LINES = 450

BLOCKED = {
    "gateway": ("torch", "transformers", "numpy", "gguf", "safetensors"),
    "scheduler": ("torch", "fastapi", "numpy", "tokenizers", "transformers", "jinja2"),
    "kvstore": ("torch", "fastapi", "numpy", "tokenizers", "transformers", "jinja2"),
    "worker": ("fastapi", "transformers", "jinja2", "typer", "matplotlib"),
}
"""What a service must start without: packages of other extras."""


def sources() -> list[Path]:
    return sorted(path for top in OWN for path in (ROOT / top).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module named by an import statement, also those inside functions."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES)


def reached_from(module: str) -> dict[str, tuple[str, ...]]:
    """Every module of ours or others reached by imports from `module`, with the chain that leads there."""
    chains: dict[str, tuple[str, ...]] = {}
    todo: list[tuple[str, tuple[str, ...]]] = [(module, (module,))]
    while todo:
        name, chain = todo.pop()
        if name in chains:
            continue
        chains[name] = chain
        if name in MODULES:
            todo += [(each, (*chain, each)) for each in imports(MODULES[name])]
    return chains


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other_or_the_deployment(service: str) -> None:
    allowed = ("shared", f"services.{service}")
    for path in (ROOT / "services" / service).rglob("*.py"):
        for name in imports(path):
            if name.split(".")[0] in OWN and name != "services":
                assert name.startswith(allowed), f"{path.relative_to(ROOT)} imports {name}"


def test_shared_knows_no_service() -> None:
    for path in (ROOT / "shared").rglob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in ("services", "deploy"), (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_torch_is_imported_only_by_the_worker() -> None:
    for path in sources():
        if (
            not path.is_relative_to(ROOT / "services" / "worker")
            and path != ROOT / "deploy" / "setup_torch.py"
        ):
            for name in imports(path):
                assert name.split(".")[0] != "torch", f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("service", ["gateway", "scheduler", "kvstore"])
def test_no_chain_of_imports_leads_from_a_service_to_what_it_must_do_without(service: str) -> None:
    entry = f"services.{service}.__main__"
    if entry not in MODULES:
        pytest.fail(f"{entry} does not exist: the service cannot be started")
    for name, chain in reached_from(entry).items():
        assert name.split(".")[0] not in BLOCKED[service], " → ".join(chain)


@pytest.mark.parametrize(
    ("package", "owner"),
    [
        ("nats", {"shared/bus/nats.py", "shared/bus/fast_client.py", "shared/bus/desk.py"}),
        ("redis", {"shared/store/redis.py"}),
    ],
)
def test_one_module_knows_each_server(package: str, owner: set[str]) -> None:
    """For NATS: the services' bus, and the desk's raw view for `status` and `tap`."""
    knowing = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(name.split(".")[0] == package for name in imports(path))
    }
    assert knowing <= owner


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_can_be_imported_where_only_its_own_packages_are_installed(service: str) -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in BLOCKED[service])
    others = "".join(f"sys.modules['services.{name}'] = None\n" for name in SERVICES if name != service)
    code = f"import sys\n{blocked}{others}import services.{service}.__main__\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_subjects_are_written_down_once() -> None:
    literal = re.compile(r"hortator\.v1\.")
    for path in sources():
        if path == ROOT / "shared" / "subjects.py":
            continue
        docstrings = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert not literal.search(node.value), f"{where} spells a subject: {node.value!r}"


def test_files_own_one_thing_and_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"split these by what they own (at most {MAX_LINES} lines): {long}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_in_one_sentence_what_it_owns(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(tree_of(path)), f"{path.relative_to(ROOT)} has no docstring"
