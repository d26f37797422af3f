"""Imports go in one direction, and torch and optuna are not loaded at startup."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import folders
import pytest

import autosplit

ROOT = folders.ROOT / "autosplit"

# Allowed imports of each package at any level, including functions and TYPE_CHECKING. All packages may import the root,
# which has shared words. Each module of the root counts alone.
MAY_IMPORT = {
    "devices": (),
    "solve": (),
    "workload": ("devices",),
    "parallel": ("devices", "solve", "workload"),
    "runtime": ("devices", "solve", "workload", "parallel"),
    "probe": ("devices", "solve", "workload", "parallel", "runtime"),
    "plan": ("devices", "solve", "probe.check_result", "parallel", "runtime"),
    "profiles": ("devices", "solve", "workload", "plan"),
    "ddp": ("devices", "solve", "parallel", "plan", "profiles"),
    "tuning": ("devices", "solve", "workload", "runtime", "probe", "plan", "profiles", "ddp"),
    "cli": ("devices", "solve", "workload", "probe", "plan", "profiles", "ddp", "tuning"),
}
CORE = tuple(MAY_IMPORT)
AROUND = ("integrations", "sim", "tools")
"""Packages around the core. Each may import the whole core. `addons` finds their functions by name."""

MAY_IMPORT |= {"sim": CORE, "tools": (*CORE, "sim"), "integrations": (*CORE, "tools")}

FOR_TYPES = {
    ("ddp.context", "tools.fsdp"),
    ("ddp.context", "tools.token_sampler"),
    ("plan.plan", "integrations.exported"),
    ("plan.plan", "tools.goodput"),
    ("plan.plan", "tools.token_sampler"),
}
"""Imports under TYPE_CHECKING, for the types of public methods, as (module, imported module)."""

IN_THE_ROOT = (
    *("accelerators", "addons", "autograd_graph", "errors", "files", "launcher", "notes", "oom"),
    *("rng", "text", "torch_versions", "__main__"),
)
WITHOUT_TORCH = (
    "errors",
    "text",
    "files",
    "solve.split",
    "solve.memory",
    "probe.check_result",
    "solve.search_space",
    "solve.trial",
    "solve.solver",
    "tools.padded_length",
    "plan.explanation",
    "plan.measured_step",
    "plan.split_comparison",
    "tools.goodput",
    "plan.validation",
    "plan.record",
    "plan.plan",
    "plan.redact",
    "profiles.store",
    "sim.cluster",
    "sim.compare",
    "cli.tables",
    "cli.pasted_code",
    "cli.plan_report",
    "cli.check_report",
    "tools.report_charts",
    "tools.report_page",
    "integrations.even_plan",
    "integrations.export",
    "tools.canvas",
    "tools.charts",
    "cli.output",
    "cli.named_plan",
    "cli.stored_profile",
    "cli.workload_arguments",
    "cli.commands.profiles",
    "tools.devices_command",
    "cli.commands.tune",
    "sim.compare_command",
    "cli.commands.measure",
    "cli.commands.probe",
    "cli.commands.check",
    "cli.commands.show",
    "cli.commands.launch",
    "tools.report_command",
    "integrations.export_command",
    "cli.options",
    "cli.commands",
    "tools.commands",
    "sim.commands",
    "integrations.commands",
    "cli.parser",
    "cli.main",
)
MOST_MODULES = 80
MOST_LINES = 14_007
"""Limits on what `import autosplit.tuning.tune` loads of autosplit. Lower them when it loads less."""

TOOLS = ("accelerate", "lightning", "peft", "ray", "transformers")
"""Only its own integration, and code that builds a model by its name, import each tool. All tools are optional."""

HEAVY = ("torch", "optuna", "pynvml", "rich")


@functools.cache
def parsed(text: str) -> ast.Module:
    """Parse a module once for all tests. The key is the text, because some tests write a file twice."""
    return ast.parse(text)


def modules_in(root: Path) -> dict[str, Path]:
    """Map each module under `root`, named as one imports it from there, to its file.

    The top __init__ is left out: it holds lazy names, which have their own tests.
    """
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def own_module(dotted: str, known: set[str]) -> str | None:
    """Turn `autosplit.runtime.cpu.Cpu` into `runtime.cpu`: the longest prefix that is one of our modules."""
    parts = dotted.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    home = autosplit._HOMES.get(parts[0]) if parts else None
    return home or None


def names_imported(node: ast.AST, package: list[str]) -> list[str]:
    """List in full what a statement or a call imports: `from ..split import x` gives autosplit.solve.split.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = ".".join([*base, *([node.module] if node.module else [])])
        return [f"{stem}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def imports_of(path: Path, root: Path, nodes: list[ast.AST] | None = None) -> set[str]:
    """Collect the full names that a file imports, everywhere in it or only in `nodes`."""
    package = ["autosplit", *path.relative_to(root).parts[:-1]]
    walked = ast.walk(parsed(path.read_text())) if nodes is None else nodes
    return {name for node in walked for name in names_imported(node, package)}


def graph_of(root: Path) -> dict[str, set[str]]:
    """Map each module to those of our own that it imports."""
    modules = modules_in(root)
    graph = {}
    for name, path in modules.items():
        ours = {full for full in imports_of(path, root) if full.split(".")[0] == "autosplit"}
        graph[name] = {target for full in ours if (target := own_module(full, set(modules)))} - {name}
    return graph


def violations(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the imports that the table forbids, as (module, imported module)."""
    return {
        (name, target)
        for name, targets in graph.items()
        if name != "__main__"  # it starts the command line
        for target in targets
        if not may_import(package_of(name), target)
    }


def package_of(module: str) -> str:
    """Return the package of a module. The root's name is empty."""
    first = module.partition(".")[0]
    return first if first in MAY_IMPORT else ""


def may_import(package: str, target: str) -> bool:
    """Return whether a package may import a module: from itself, from the root, or from its line in the table."""
    return package_of(target) in ("", package) or any(
        target == one or target.startswith(f"{one}.") for one in MAY_IMPORT.get(package, ())
    )


def module_level(tree: ast.Module) -> list[ast.AST]:
    """List the nodes that run when the module is imported: nothing inside a function or under TYPE_CHECKING."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if _is_for_types(node):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and return the modules of HEAVY that it loaded."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_module_lies_in_a_package() -> None:
    outside = {name for name in modules_in(ROOT) if not package_of(name)}
    assert outside == set(IN_THE_ROOT)


def test_imports_flow_one_way() -> None:
    assert violations(graph_of(ROOT)) == FOR_TYPES


def test_types_are_all_that_the_core_needs_of_the_packages_around_it() -> None:
    for name, target in FOR_TYPES:
        path = modules_in(ROOT)[name]
        nodes = list(ast.walk(parsed(path.read_text())))
        for_types = [inner for node in nodes if _is_for_types(node) for inner in ast.walk(node)]
        rest = [node for node in nodes if node not in for_types]
        assert not [full for full in imports_of(path, ROOT, rest) if full.startswith(f"autosplit.{target}.")]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def test_the_table_has_an_order() -> None:
    """Each package imports only packages above it, except for one check result that plans contain."""
    packages = list(MAY_IMPORT)
    for package, targets in MAY_IMPORT.items():
        assert all(packages.index(target.partition(".")[0]) < packages.index(package) for target in targets)


def test_tools_are_imported_where_they_are_meant() -> None:
    naming = {name: path for name, path in modules_in(ROOT).items() if any(tool in path.read_text() for tool in TOOLS)}
    found = {
        name: {full.split(".")[0] for full in imports_of(path, ROOT)} & set(TOOLS) for name, path in naming.items()
    }
    assert {name: tools for name, tools in found.items() if tools} == {
        "integrations.accelerate": {"accelerate"},
        "integrations.shares_optimizer": {"accelerate"},
        "integrations.uneven_gather": {"accelerate"},
        "integrations.lightning": {"lightning"},
        "integrations.lightning_workload": {"lightning"},
        "integrations.ray": {"ray"},
        "integrations.transformers": {"accelerate", "transformers"},  # its tools
        "integrations.transformers_workload": {"transformers"},
        "sim.from_name": {"transformers"},
        "sim.lora": {"peft"},
    }


def test_no_import_cycles() -> None:
    try:
        list(graphlib.TopologicalSorter(graph_of(ROOT)).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_modules_name_the_module_they_need() -> None:
    """`import autosplit` inside the package would hide the real imports from this test."""
    bare = [name for name, path in modules_in(ROOT).items() if "autosplit" in imports_of(path, ROOT)]
    assert not bare, f"{bare} import autosplit itself: import the module that has the name"


def test_modules_without_torch_import_none_at_module_level() -> None:
    modules = modules_in(ROOT)
    level = {name: module_level(parsed(modules[name].read_text())) for name in WITHOUT_TORCH}  # KeyError: renamed
    assert not [
        (name, full)
        for name, nodes in level.items()
        for full in imports_of(modules[name], ROOT, nodes)
        if full.split(".")[0] == "torch"
    ]


def test_what_needs_no_torch_loads_none() -> None:
    statement = "import " + ", ".join(f"autosplit.{name}" for name in WITHOUT_TORCH)
    assert not loaded_by(statement) & {"torch", "optuna", "pynvml"}


def test_import_autosplit_loads_nothing_heavy() -> None:
    assert not loaded_by("import autosplit")


def test_tune_loads_few_modules() -> None:
    code = """
import sys
from pathlib import Path
import autosplit.tuning.tune
loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "autosplit"]
print(len(loaded), sum(len(Path(module.__file__).read_text(encoding="utf-8").splitlines()) for module in loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules, lines = map(int, done.stdout.split())
    assert modules <= MOST_MODULES, f"autosplit.tuning.tune loads {modules} modules"
    assert lines <= MOST_LINES, f"autosplit.tuning.tune loads {lines:,} lines"


def test_wrappers_stand_without_the_tuner() -> None:
    assert not loaded_by("import autosplit.parallel.balanced, autosplit.ddp") & {"optuna", "rich"}


def test_lazy_names_are_defined_in_their_modules() -> None:
    modules = modules_in(ROOT)
    defined = {
        home: {
            node.name
            for node in parsed(modules[home].read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        for home in autosplit._HOMES.values()
    }
    assert not [(name, home) for name, home in autosplit._HOMES.items() if name not in defined[home]]


def test_type_checkers_see_the_same_lazy_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: str(node.module).removeprefix("autosplit.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == autosplit._HOMES | {"ddp": "autosplit"}


@pytest.mark.parametrize(
    "line",
    [
        "from autosplit.cli.main import main",
        "from ..cli.main import main",
        "def late():\n    from autosplit.cli.main import main",
        "if TYPE_CHECKING:\n    from autosplit.cli.main import main",
        "importlib.import_module('autosplit.cli.main')",
    ],
)
def test_the_check_sees_a_downward_import(tmp_path: Path, line: str) -> None:
    place(tmp_path, "cli/main.py")
    place(tmp_path, "plan/plan.py", line)
    assert violations(graph_of(tmp_path)) == {("plan.plan", "cli.main")}


def test_the_check_sees_a_downward_import_of_a_public_name(tmp_path: Path) -> None:
    place(tmp_path, "tuning/tune.py")
    place(tmp_path, "plan/plan.py", "from autosplit import tune")
    assert violations(graph_of(tmp_path)) == {("plan.plan", "tuning.tune")}


def place(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
