"""Imports point one way, nothing heavy is loaded early, and every public name is what it says.

The tables are the rule and the code below only reads them. A new module goes into `LAYERS`.
"""

import ast
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

import kvhub

ROOT = Path(__file__).parents[1]

# A module imports from its own layer and those above it in this table, never from those below.
# A folder stands for all of its files.
LAYERS = [
    [
        *("architectures", "atomic", "bootstrap", "configs", "errors", "gate", "hub_cache"),
        "hub_client",
        *("hub_errors", "library", "report", "rope", "spans", "spec", "tokenization", "versions"),
    ],
    [
        *("attention", "cache", "compatibility", "continuations", "corpus", "data", "estimates"),
        *("mapper_config", "models", "networks", "probe", "products", "recipe", "roofline"),
        "tensor_file",
    ],
    ["hub", "hub_download", "mapper", "moments", "package", "stats", "store"],
    [
        *("calibration", "conversation", "exact", "generation", "policy", "prior", "recompute"),
        *("ridge", "selection"),
    ],
    [
        *("cards", "comparison", "difference", "evaluation", "fidelity", "fitting", "lockfile"),
        *("lm_eval_adapter", "lm_eval_tasks", "metrics", "pairs", "pipeline", "plots"),
        *(
            "alignment",
            "alignment_passes",
            "alignment_reading",
            "alignment_rows",
            "alignment_state",
            "key_fit",
            "mlp",
            "mlp_training",
            "publishing",
            "refitting",
            "release",
            "remote",
            "repairing",
            "value_fit",
        ),
        *("signing", "status"),
    ],
    ["exporters"],
    ["console"],
    ["artifact_tables", "tables"],
    ["cli_options"],
    ["cli_export", "cli_mappers", "cli_models", "cli_refit", "cli_repair"],
    ["cli"],
    ["__main__"],
]
# Allowed all the same, but inside a function only: writing a package writes its card, and a mapper
# is loaded by a lock file, checked for a signature and published by its own methods.
UPWARDS_INSIDE_FUNCTIONS = {
    ("package", "cards"),
    *(("mapper", unit) for unit in ("lockfile", "publishing", "signing")),
    *((unit, "signing") for unit in ("hub_download", "store")),
}
# Forbidden although the layers would allow it.
NEVER = {
    "exporters": {"calibration", "cards", "evaluation", "pipeline", "ridge"},
}
# Third-party packages that only these may import.
ONLY_IN = {
    "rich": {"console"},
    "typer": {
        *("cli", "cli_export", "cli_mappers", "cli_models", "cli_options", "cli_refit"),
        "cli_repair",
    },
    "huggingface_hub": {
        *("cards", "configs", "corpus", "hub", "hub_cache", "hub_client", "hub_download"),
        *("hub_errors", "models", "package", "publishing", "remote", "spec"),
    },
    "model_signing": {"signing"},
    "cryptography": {"signing"},
    "semantic_version": {"versions"},
    "datasets": {"corpus"},
    "pyarrow": {"corpus"},
    "matplotlib": {"plots"},
    "lm_eval": {"lm_eval_adapter", "lm_eval_tasks"},
    "mooncake": {"exporters"},
    "onnx": {"exporters"},
    "onnxruntime": {"exporters"},
    "triton": {"exporters"},
    "tensorrt_llm": {"exporters"},
    "vllm": {"exporters"},
}
# Loaded by every command, or needed to look at a pair: neither torch nor transformers.
LIGHT = [
    *("", ".cli", ".console", ".errors", ".spec", ".fitting", ".pipeline", ".recipe", ".store"),
    *(".hub", ".lockfile", ".publishing", ".refitting", ".repairing", ".status", ".versions"),
]

LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}
FILES = {
    f"{prefix}{path.stem}": path
    for folder, prefix in (("kvhub", ""), ("exporters", "exporters."), ("cards", "cards."))
    for path in sorted((ROOT / folder).glob("*.py"))
}
MODULES = [name for name in FILES if name != "__init__"]


@dataclass(frozen=True)
class Import:
    """One imported module, with its line and whether it runs when the file is imported."""

    target: str
    line: int
    at_import: bool


def unit(module: str) -> str:
    """`exporters` for `exporters.onnx_graph`, the module itself for those of kvhub/."""
    return module.split(".")[0]


def imports(module: str) -> Iterator[Import]:
    """All imports of a file but those for type checkers, with `kvhub.` kept and dots resolved."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, at_import)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            for target in targets(module, node):
                yield Import(target, node.lineno, at_import)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside)

    return visit(ast.parse(FILES[module].read_text(encoding="utf-8")), True)


def targets(module: str, node: ast.ImportFrom) -> Iterator[str]:
    package = ["kvhub", *module.split(".")[:-1]]
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        if source == "kvhub" and alias.name in kvhub._HOME_OF:
            yield f"kvhub.{kvhub._HOME_OF[alias.name]}"
        elif source == "kvhub" and alias.name == "__version__":
            yield "importlib.metadata"
        elif source in ("kvhub", "kvhub.exporters", "kvhub.cards"):
            found = f"{source}.{alias.name}"
            yield found if found.removeprefix("kvhub.") in [*FILES, *LAYER_OF] else source
        else:
            yield source


def own(target: str) -> str | None:
    """The module of this project that is meant, if it is one."""
    return target.removeprefix("kvhub.") if target.startswith("kvhub.") else None


def run_python(code: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    importer = unit(module)
    assert importer in LAYER_OF, f"{FILES[module]} needs a line in LAYERS"
    wrong = []
    for found in imports(module):
        imported = own(found.target) and unit(own(found.target))
        if imported is None or imported == importer:
            continue
        assert imported in LAYER_OF, f"{module}:{found.line} imports {found.target}, in no layer"
        upwards = LAYER_OF[imported] > LAYER_OF[importer]
        if (importer, imported) in UPWARDS_INSIDE_FUNCTIONS:
            upwards = found.at_import
        if upwards or imported in NEVER.get(importer, ()):
            wrong.append(f"line {found.line}: {found.target}")
    assert not wrong, f"{FILES[module]} may not import\n" + "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_third_party_packages_stay_in_their_modules(module):
    wrong = [
        f"line {found.line}: {found.target}"
        for found in imports(module)
        if unit(module) not in ONLY_IN.get(found.target.split(".")[0], {unit(module)})
    ]
    assert not wrong, f"{FILES[module]} may not import\n" + "\n".join(wrong)


def test_nothing_imports_the_command_line():
    importers = [m for m in MODULES for found in imports(m) if own(found.target) == "cli"]
    assert importers == ["__main__"]


def test_modules_do_not_import_each_other_in_circles():
    graph = {
        module: {own(found.target) for found in imports(module) if found.at_import} - {None, module}
        for module in MODULES
    }
    while leaves := {module for module, needed in graph.items() if not needed & graph.keys()}:
        graph = {module: needed for module, needed in graph.items() if module not in leaves}
    assert not graph, f"these import each other: {graph}"


def test_the_installed_folders_are_never_imported_by_their_bare_names():
    bare = [
        f"{module}:{found.line}"
        for module in FILES
        for found in imports(module)
        if found.target.split(".")[0] in ("exporters", "cards")
    ]
    assert bare == []


@pytest.mark.parametrize(
    "name", [name for name in LIGHT if not name or name.removeprefix(".") in FILES]
)
def test_light_modules_load_neither_torch_nor_transformers(name):
    code = f"import kvhub{name}, sys; print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert f"kvhub{name}" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "matplotlib", "datasets"}


def test_public_names_are_listed_once_and_sorted():
    assert kvhub.__all__ == sorted({*kvhub._HOME_OF, "__version__"})
    assert dir(kvhub) == kvhub.__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(FILES["__init__"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("kvhub.")
        for node in block.body
        for alias in node.names
    }
    assert seen == kvhub._HOME_OF


@pytest.mark.parametrize("name", kvhub.__all__)
def test_public_names_resolve_to_what_their_home_defines(name):
    value = getattr(kvhub, name)
    assert not isinstance(value, types.ModuleType)
    if name in kvhub._HOME_OF:
        assert value is getattr(import_module(f"kvhub.{kvhub._HOME_OF[name]}"), name)
        assert value.__module__ == f"kvhub.{kvhub._HOME_OF[name]}"


def test_no_module_hides_a_public_name():
    # Importing a submodule sets it as an attribute of its package, over whatever was there.
    modules = ", ".join(f"kvhub.{module}" for module in sorted(set(kvhub._HOME_OF.values())))
    code = f"import types, {modules}; print([name for name in kvhub.__all__ if"
    code += " isinstance(getattr(kvhub, name), types.ModuleType)])"
    assert run_python(code).strip() == "[]"
    assert not {*kvhub.__all__} & {*FILES, "exporters", "cards"}


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'callibrate'"):
        kvhub.callibrate  # noqa: B018
