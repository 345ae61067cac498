"""Rules that a machine can check: imports, lengths of files and functions, docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import qattn_hf

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"qattn_kernels": ROOT / "kernels" / "qattn_kernels", "qattn_hf": ROOT / "qattn_hf"}
SOURCES = sorted(
    path for name in ("qattn_hf", "kernels", "eval", "examples", "tests") for path in (ROOT / name).rglob("*.py")
)
FILE_LINES, FUNCTION_LINES = 400, 60
ENTRIES = 20  # modules and folders of a folder
PARAMETERS, MANY_PARAMETERS, MOST_PARAMETERS = 12, 14, 18  # many: functions above the first number
COMPLEXITY, MANY_COMPLEX, MOST_COMPLEXITY = 15, 4, 17
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
Graph = dict[str, set[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Modules at the top of `qattn_hf` that hand on names of a room, since users or their scripts import them from there.
FACES = {"check", "compare", "inspect", "plan", "spelling", "tune"}
# Modules that scripts outside of this repository import, with the names that they use.
STAY = {
    "qattn_hf": (
        "assets.demo_model_dir cache.QAttnCache errors.QAttnError layer.QAttnLayer lm_eval.model.QAttnLM "
        "methods.get_method saved.read_header saved.fill spelling.split_method check.check plan.Planner"
    ),
    "qattn_kernels": (
        "layer.arena.Layout layer.arena.views layer.scores.Scores layer.spec.decode_spec step.kernels.fused_step"
    ),
}
# What `qattn_hf` may import of the kernels, as the docstring of `qattn_kernels` says.
PUBLIC = re.compile(
    r"qattn_kernels\.(formats(\.traits|\.\w+\.reference)?|chip|layout|layer\.\w+|step\.\w+|launch\.plan)"
)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """What a file imports and the functions that it defines, anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, Function))]


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped() -> Iterator[None]:
    """Millions of objects would slow each garbage collection of the tests of other files."""
    yield
    nodes.cache_clear()


def module_name(path: Path) -> str:
    """The name under which a file of one of the packages is imported."""
    package = next(folder for folder in PACKAGES.values() if folder in path.parents)
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, modules: set[str]) -> set[str]:
    """Return the `modules` that a file imports anywhere."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, line {node.lineno}"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & modules) or {node.module or ""}
    return found & modules


@cache
def module_graph() -> Graph:
    """Every module of both packages, and what it imports of them."""
    files = {module_name(path): path for folder in PACKAGES.values() for path in folder.rglob("*.py")}
    return {name: imports(path, set(files)) - {name} for name, path in files.items()}


def entry_graph(modules: Graph, folder: str) -> Graph:
    """Return which entries of a folder import which others.

    Entries are files, folders, and the code in `__init__.py`.
    """
    found: Graph = {}

    def entry(name: str) -> str | None:
        if name == folder:
            return "__init__"
        return name.removeprefix(f"{folder}.").split(".")[0] if name.startswith(f"{folder}.") else None

    for name, used in modules.items():
        if (own := entry(name)) is not None:
            others = {other for other in map(entry, used) if other is not None}
            found.setdefault(own, set()).update(others - {own})
    return found


def folders(package: str) -> list[str]:
    """Dotted names of a package and of all folders in it."""
    paths = PACKAGES[package].rglob("__init__.py")
    return sorted(module_name(path) for path in paths)


def arrows(graph: Graph) -> int:
    return sum(map(len, graph.values()))


def floors(graph: Graph) -> list[set[str]]:
    """The lowest floor imports nothing, each other one only what lies below it.

    Raises:
        graphlib.CycleError: if there is no such order; its second argument is a circle of imports.
    """
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        found.append(set(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def test_a_circle_of_imports_is_found():
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [{"c"}, {"b"}, {"a"}]
    with pytest.raises(CycleError):
        floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})


@pytest.mark.slow
def test_kernels_do_not_import_the_package_above_them():
    modules = module_graph()
    assert len(modules) > 100 and any(other.startswith("qattn_kernels.") for other in modules["qattn_hf.layer.layer"])
    found = {(name, other) for name, used in modules.items() for other in used if name.startswith("qattn_kernels")}
    assert {pair for pair in found if not pair[1].startswith("qattn_kernels")} == set()


@pytest.mark.slow
def test_no_module_of_the_kernels_imports_itself_by_others():
    modules = {name: used for name, used in module_graph().items() if name.startswith("qattn_kernels")}
    assert len(floors(modules)) > 1


def test_imports_of_the_kernels_point_down():
    """Between the files and folders at the top of `qattn_kernels`: no circle."""
    graph = entry_graph(module_graph(), "qattn_kernels")
    graph.pop("__init__")  # which hands on names of all rooms
    order = floors(graph)
    print(f"{len(graph)} entries on {len(order)} floors, {arrows(graph)} arrows, none back")
    assert order[0] <= {"chip", "layout", "jit"} and order[-1] == {"step"}


@pytest.mark.parametrize("folder", [*folders("qattn_hf"), "qattn_kernels.ops"])
def test_no_folder_has_a_circle_of_imports(folder: str):
    """Between the files and folders of one folder; imports inside of functions and for types count."""
    assert floors(entry_graph(module_graph(), folder))


def rooms() -> list[str]:
    """The rooms of `qattn_hf` as `docs/architecture.md` lists them, the lowest first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \| ", text.partition("### Rooms of `qattn_hf`")[2].partition("\n#")[0], re.M)
    return [name.rstrip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([\w/.]+)`", row)]


def test_rooms_have_an_order():
    """Every room imports only those above it in the page; faces and what starts a process are imported by no room."""
    graph = entry_graph(module_graph(), "qattn_hf")
    order, top = rooms(), {"__init__", "__main__", "cli"}
    assert {*order} | FACES | top == {*graph}
    number = {name: i for i, name in enumerate(order)}
    assert {(a, b) for a in order for b in graph[a] if number.get(b, len(order)) >= number[a]} == set()
    print(f"{len(graph)} entries on {len(floors(graph))} floors, {arrows(graph)} arrows, none back")


def test_faces_only_hand_on_names():
    for name in FACES:
        _, *body = ast.parse((PACKAGES["qattn_hf"] / f"{name}.py").read_text(encoding="utf-8")).body
        assert {type(node) for node in body} == {ast.ImportFrom, ast.Assign}, name


@pytest.mark.parametrize("folder", folders("qattn_hf"))
def test_folders_have_at_most_20_entries(folder: str):
    inside = {*entry_graph(module_graph(), folder)} - {"__init__", "__main__", "_version"}
    assert len(inside - FACES if folder == "qattn_hf" else inside) <= ENTRIES


def test_only_public_modules_of_the_kernels_are_imported():
    """By any module of `qattn_hf`; names of a package itself are imported from it."""
    inner = {
        (name, other)
        for name, used in module_graph().items()
        for other in used
        if name.startswith("qattn_hf") and other.startswith("qattn_kernels") and not PUBLIC.fullmatch(other)
    }
    assert inner == set()


@pytest.mark.parametrize(("package", "path"), [(package, path) for package in STAY for path in STAY[package].split()])
def test_modules_that_others_import_stay(package: str, path: str):
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(f"{package}.{module}"), name))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        if isinstance(node, Function):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_have_at_most_400_lines():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES
    }
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_functions_fit_a_screen():
    long = {
        f"{path.relative_to(ROOT)}: {name}": lines
        for path in SOURCES
        for name, lines in functions(path)
        if lines > FUNCTION_LINES
    }
    assert long == {}


def defined() -> Iterator[tuple[str, Function]]:
    """Functions of both packages, with the module that defines them."""
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            for node in nodes(path):
                if isinstance(node, Function):
                    yield f"{module_name(path)}.{node.name}", node


def parameters(function: Function) -> int:
    taken = function.args
    named = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs)
    return named + (taken.vararg is not None) + (taken.kwarg is not None)


def complexity(function: Function) -> int:
    """Cyclomatic complexity: one more than the decisions of a function, those in expressions included."""
    found = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        else:
            found += isinstance(node, DECISIONS)
    return found


def test_decisions_are_counted():
    code = "def f(a, *b, c=1, **d):\n    if a and b or c: return [x for x in d if x]\n    return 1 if a else 2"
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert (parameters(function), complexity(function)) == (4, 7)


def test_few_functions_have_many_parameters():
    """A command has a parameter for each option. A kernel has one for each number that Triton must not compile in."""
    many = {name: n for name, node in defined() if (n := parameters(node)) > PARAMETERS}
    print(f"{len(many)} functions have more than {PARAMETERS} parameters, the most are {max(many.values())}")
    assert len(many) <= MANY_PARAMETERS and max(many.values()) <= MOST_PARAMETERS, many


def test_few_functions_decide_much():
    complex_ones = {name: n for name, node in defined() if (n := complexity(node)) > COMPLEXITY}
    print(f"{len(complex_ones)} functions have a cyclomatic complexity above {COMPLEXITY}")
    assert len(complex_ones) <= MANY_COMPLEX and max(complex_ones.values()) <= MOST_COMPLEXITY, complex_ones


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and classes of `qattn_hf.__all__`, and the methods that these classes define for users."""
    for name in qattn_hf.__all__:
        thing = getattr(qattn_hf, name)
        if callable(thing):
            yield name, thing
        for key, value in vars(thing).items() if inspect.isclass(thing) else ():
            method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not key.startswith("_") and inspect.isfunction(method):
                yield f"{name}.{key}", method


DOCUMENTED = dict(public_functions())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_names_are_documented(name: str):
    """Each has a sentence that says what it is and names our errors that it raises.

    A function of the package itself names its arguments.
    """
    thing = DOCUMENTED[name]
    text = inspect.cleandoc(thing.__doc__ or "")
    assert re.match(r"[A-Z`].*", text), "a docstring begins with a sentence"
    if not inspect.isfunction(thing):
        return
    parameters = [p for p in inspect.signature(thing).parameters if p not in ("self", "cls", "args", "kwargs")]
    if "." not in name:
        assert [p for p in parameters if not re.search(rf"\b{p.partition('_or_')[0]}\b", text)] == []
        assert not parameters or "Raises:" in text
    raised = (
        node.exc
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(thing))))
        if isinstance(node, ast.Raise)
    )
    errors = {error.func.id for error in raised if isinstance(error, ast.Call) and isinstance(error.func, ast.Name)}
    assert {error for error in errors if error in qattn_hf.__all__ and error not in text} == set()


def test_version_changelog_and_citation_agree():
    """Both files have a date or neither does. The changelog dates tagged versions and calls the rest unreleased."""
    text = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff")}
    (first, date), *_ = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text["CHANGELOG.md"], re.M)
    assert first == (qattn_hf.__version__ if date else "Unreleased")
    assert f"\nversion: {qattn_hf.__version__}\n" in text["CITATION.cff"]
    assert re.findall(r"^date-released: (.+)$", text["CITATION.cff"], re.M) == ([date] if date else [])
