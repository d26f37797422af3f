"""The house stands: imports flow one way, torch and optuna stay out of what must start at once."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import autosplit

ROOT = Path(__file__).parents[1] / "autosplit"

# A module imports only what stands above it, at any level: inside functions and under TYPE_CHECKING, too. A package's
# own name is its __init__, which stands below its modules.
ORDER = (
    "errors",
    "accelerators",
    "printed",
    "split",
    "oom",
    "executable",
    "rng",
    "interrupts",
    "garbage",
    "bounded",
    "isolation",
    "transfer",
    "accumulation",
    "batches",
    "drawing",
    "states",
    "sizes",
    "files",
    "host",
    "catalog",
    "devices",
    "survey",
    "examination",
    "meeting",
    "rates",
    "request",
    "workload",
    "precisions",
    "compiling",
    "trainee",
    "links",
    "copies",
    "replicas",
    "kept",
    "running",
    "heads",
    "reducing",
    "gathering",
    "balanced",
    "cost",
    "timings",
    "findings",
    "space",
    "solver",
    "proposals",
    "runtime.measurement",
    "runtime.timing",
    "runtime.workspaces",
    "runtime.tracking",
    "runtime.placed",
    "runtime.tracing",
    "runtime.affine_traces",
    "runtime.accelerator",
    "runtime.cpu",
    "runtime.simulated",
    "runtime.isolated",
    "runtime",
    "staging",
    "wall_search",
    "probe",
    "quiet",
    "rules",
    "watching",
    "checks",
    "cost_model_sampler",
    "search",
    "schedule",
    "explanation",
    "relaxing",
    "even_ranks",
    "explaining",
    "sensitivity",
    "soundness",
    "markup",
    "record",
    "sharing",
    "torchrun",
    "export",
    "plan",
    "fingerprint",
    "profiles",
    "waiting",
    "mismatches",
    "recalling",
    "resolving",
    "confirming",
    "progress",
    "notebook",
    "assembly",
    "session",
    "ddp.place",
    "ddp.devices",
    "ddp.lines",
    "ddp.faults",
    "ddp.consensus",
    "ddp.job",
    "ddp.ranks",
    "ddp.joint",
    "tuning",
    "measured_errors",
    "doctor",
    "comparing",
    "ddp.plans",
    "ddp.sharding",
    "ddp.parts",
    "ddp.checkpoints",
    "ddp.metadata",
    "ddp.folders",
    "ddp.loops",
    "ddp.batchnorms",
    "ddp.context",
    "ddp.process",
    "ddp",
    "report",
    "charts",
    "page",
    "terminal",
    "integrations.share",
    "integrations.loaders",
    "integrations.counting",
    "integrations.weighing",
    "integrations.own_loss",
    "integrations.loop_position",
    "integrations.uneven_gather",
    "integrations.transformers",
    "integrations.accelerate",
    "integrations.lightning_step",
    "integrations.lightning",
    "integrations",
    "loading",
    "outcome",
    "launching",
    "commands.saying",
    "commands.log",
    "commands.stored",
    "commands.workloads",
    "commands.listing",
    "commands.answers",
    "commands.profiles",
    "commands.devices",
    "commands.doctor",
    "commands.tune",
    "commands.compare",
    "commands.probe",
    "commands.check",
    "commands.show",
    "commands.launch",
    "commands.report",
    "commands.export",
    "commands",
    "cli",
    "__main__",
)
WITHOUT_TORCH = (
    "errors",
    "printed",
    "files",
    "split",
    "cost",
    "findings",
    "space",
    "solver",
    "explanation",
    "soundness",
    "record",
    "plan",
    "sharing",
    "profiles",
    "measured_errors",
    "comparing",
    "report",
    "charts",
    "page",
    "export",
    "commands.saying",
    "commands.log",
    "commands.stored",
    "commands.workloads",
    "commands.listing",
    "commands.answers",
    "commands.profiles",
    "commands.devices",
    "commands.tune",
    "commands.compare",
    "commands.probe",
    "commands.check",
    "commands.show",
    "commands.launch",
    "commands.report",
    "commands.export",
    "cli",
)
TOOLS = ("accelerate", "lightning", "transformers")
"""Each is imported by its own integration, and by nothing else: nobody has to have it."""

HEAVY = ("torch", "optuna", "pynvml", "typer", "rich")


def modules_in(root: Path) -> dict[str, Path]:
    """Map each module under `root`, named as in ORDER, to its file.

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
    """List in full what a statement or a call imports: `from ..split import x` gives autosplit.split.x."""
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
    walked = ast.walk(ast.parse(path.read_text())) if nodes is None else nodes
    return {name for node in walked for name in names_imported(node, package)}


def graph_of(root: Path) -> dict[str, set[str]]:
    """Map each module to those of our own that it imports."""
    modules = modules_in(root)
    graph = {}
    for name, path in modules.items():
        ours = {full for full in imports_of(path, root) if full.split(".")[0] == "autosplit"}
        graph[name] = {target for full in ours if (target := own_module(full, set(modules)))} - {name}
    return graph


def order_violations(graph: dict[str, set[str]]) -> list[str]:
    """Say which imports reach downwards."""
    rank = {name: position for position, name in enumerate(ORDER)}
    return [
        f"{name} imports {target}, but {target} stands below {name}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if name in rank and rank.get(target, 0) > rank[name]  # a test of its own names what ORDER lacks
    ]


def module_level(tree: ast.Module) -> list[ast.AST]:
    """List the nodes that run when the module is imported: nothing inside a function or under TYPE_CHECKING."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and say which of HEAVY it loaded."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


STARTS_AT_ONCE = [name for name in WITHOUT_TORCH if name in modules_in(ROOT)]


def test_every_module_has_its_place() -> None:
    unlisted = sorted(set(modules_in(ROOT)) - set(ORDER))
    assert not unlisted, f"{unlisted} stand nowhere in ORDER: give each its place"


def test_imports_reach_only_upwards() -> None:
    violations = order_violations(graph_of(ROOT))
    assert not violations, "\n".join(violations)


def test_tools_are_imported_by_their_integrations_only() -> None:
    naming = {name: path for name, path in modules_in(ROOT).items() if any(tool in path.read_text() for tool in TOOLS)}
    found = {
        name: {full.split(".")[0] for full in imports_of(path, ROOT)} & set(TOOLS) for name, path in naming.items()
    }
    assert {name: tools for name, tools in found.items() if tools} == {
        "integrations.accelerate": {"accelerate"},
        "integrations.uneven_gather": {"accelerate"},
        "integrations.lightning": {"lightning"},
        "integrations.lightning_step": {"lightning"},
        "integrations.transformers": {"accelerate", "transformers"},  # which it is made of
    }


def test_no_import_cycles() -> None:
    try:
        list(graphlib.TopologicalSorter(graph_of(ROOT)).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_modules_name_the_module_they_need() -> None:
    """`import autosplit` inside the package would hide from the order what is really used."""
    bare = [name for name, path in modules_in(ROOT).items() if "autosplit" in imports_of(path, ROOT)]
    assert not bare, f"{bare} import autosplit itself: import the module that has the name"


@pytest.mark.parametrize("name", STARTS_AT_ONCE)
def test_names_no_torch_at_module_level(name: str) -> None:
    path = modules_in(ROOT)[name]
    imported = imports_of(path, ROOT, module_level(ast.parse(path.read_text())))
    assert not {full for full in imported if full.split(".")[0] == "torch"}


def test_what_needs_no_torch_loads_none() -> None:
    statement = "import " + ", ".join(f"autosplit.{name}" for name in STARTS_AT_ONCE)
    assert not loaded_by(statement) & {"torch", "optuna", "pynvml"}


def test_import_autosplit_loads_nothing_heavy() -> None:
    assert not loaded_by("import autosplit")


@pytest.mark.parametrize("module", ["autosplit.balanced", "autosplit.ddp"])
def test_wrappers_stand_without_the_tuner(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"optuna", "typer", "rich"}


@pytest.mark.parametrize(("name", "home"), sorted(autosplit._HOMES.items()))
def test_lazy_names_resolve(name: str, home: str) -> None:
    modules = modules_in(ROOT)
    assert home in modules, f"autosplit.{name} should come from autosplit.{home}, which does not exist"
    tree = ast.parse(modules[home].read_text())
    top = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert name in defined, f"autosplit.{home} {'only imports' if name in top else 'has no'} {name}"


def test_type_checkers_see_the_same_lazy_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: str(node.module).removeprefix("autosplit.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == autosplit._HOMES


@pytest.mark.parametrize(
    "line",
    [
        "from autosplit.cli import main",
        "from autosplit import cli",
        "import autosplit.cli as command_line",
        "from . import cli",
        "from .cli import main",
        "def late():\n    from autosplit.cli import main",
        "if TYPE_CHECKING:\n    from autosplit.cli import main",
        "importlib.import_module('autosplit.cli')",
    ],
)
def test_the_check_sees_a_downward_import(tmp_path: Path, line: str) -> None:
    (tmp_path / "cli.py").write_text("")
    (tmp_path / "plan.py").write_text(line)
    assert order_violations(graph_of(tmp_path)) == ["plan imports cli, but cli stands below plan"]


def test_the_check_sees_a_downward_import_of_a_public_name(tmp_path: Path) -> None:
    (tmp_path / "tuning.py").write_text("")
    (tmp_path / "plan.py").write_text("from autosplit import tune")
    assert order_violations(graph_of(tmp_path)) == ["plan imports tuning, but tuning stands below plan"]


def test_the_check_sees_inside_packages(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    for name in ("__init__", "cpu", "tracking"):
        (tmp_path / "runtime" / f"{name}.py").write_text("")
    (tmp_path / "runtime" / "cpu.py").write_text("from .tracking import Tracker\nfrom ..errors import InputError")
    (tmp_path / "errors.py").write_text("")
    assert graph_of(tmp_path)["runtime.cpu"] == {"runtime.tracking", "errors"}
    assert not order_violations(graph_of(tmp_path))
    (tmp_path / "runtime" / "tracking.py").write_text("from autosplit.runtime import cpu")
    expected = "runtime.tracking imports runtime.cpu, but runtime.cpu stands below runtime.tracking"
    assert order_violations(graph_of(tmp_path)) == [expected]


def test_the_check_tells_module_level_from_later() -> None:
    source = (
        "import a\ndef f():\n    import b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\nclass E:\n    import e"
    )
    nodes = module_level(ast.parse(source))
    assert {name for node in nodes for name in names_imported(node, ["autosplit"])} == {"a", "d", "e"}
