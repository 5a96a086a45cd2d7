"""The API reference is complete: every exported name, argument and field is described."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedcog
from fedcog import Algorithm, Experiment, tree
from fedcog.testing import check_algorithm
from tests.support.documents import blocks
from tests.support.paths import REPO

REFERENCE = (REPO / "docs" / "api.md").read_text()
ENTRIES = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)
CLASSES = [value for name in fedcog.__all__ if inspect.isclass(value := getattr(fedcog, name))]
FUNCTIONS = [value for name in fedcog.__all__ if inspect.isfunction(value := getattr(fedcog, name))]
HOOKS = [value for name, value in vars(Algorithm).items() if inspect.isfunction(value)]
TREE = [value for value in vars(tree).values() if inspect.isfunction(value)]


def public_methods(cls: type) -> list[Callable[..., Any]]:
    """Return the methods that a class defines itself, with the constructor of plain classes.

    `Algorithm` describes the arguments of hooks; overrides describe only what they do.
    """
    hooks = vars(Algorithm) if cls is not Algorithm and issubclass(cls, Algorithm) else {}
    methods = [
        value
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in hooks
    ]
    is_record = dataclasses.is_dataclass(cls) or issubclass(cls, tuple)
    if "__init__" in vars(cls) and not is_record:
        methods.append(cls.__init__)  # type: ignore[misc]
    return methods


def described(doc: str, section: str) -> set[str]:
    """Return the names that a section of a Google docstring describes."""
    match = re.search(rf"^{section}:\n((?: +.*\n?|\n)*)", doc, re.MULTILINE)
    if match is None:
        return set()
    return set(re.findall(r"^ {4}\**(\w+):", match.group(1), re.MULTILINE))


def documented_functions() -> Iterator[Any]:
    methods = [method for cls in CLASSES for method in public_methods(cls)]
    for function in {*FUNCTIONS, *HOOKS, *TREE, *methods, check_algorithm}:
        name = function.__name__
        if not name.startswith("_") or name == "__init__":
            yield pytest.param(function, id=f"{function.__module__}.{function.__qualname__}")


def test_every_exported_name_has_an_entry() -> None:
    names = {entry.rpartition(".")[2] for entry in ENTRIES}
    assert set(fedcog.__all__) - {"__version__"} - names == set()


def test_every_entry_exists() -> None:
    for entry in ENTRIES:
        value: Any = fedcog
        for part in entry.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize("function", sorted(documented_functions(), key=lambda one: one.id))
def test_arguments_and_results_are_described(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    parameters = signature.parameters.keys() - {"self", "cls"}
    doc = inspect.getdoc(function) or ""
    assert doc
    if len(parameters) >= 2 or "Args:" in doc:
        assert parameters - described(doc, "Args") == set()
    if len(parameters) >= 2 and signature.return_annotation not in (None, "None"):
        assert "Returns:" in doc


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: str(cls.__name__))
def test_fields_are_described(cls: type) -> None:
    doc = inspect.getdoc(cls) or ""
    if issubclass(cls, Algorithm | Experiment):
        assert all(
            field.metadata.get("help") or field.name in ("inner", "algorithm")
            for field in dataclasses.fields(cls)
        )
    elif dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
        assert names - described(doc, "Attributes") == set()
    elif issubclass(cls, tuple):
        assert set(cls._fields) - described(doc, "Attributes") == set()  # type: ignore[attr-defined]


def examples() -> Iterator[Any]:
    """Yield the examples of all docstrings in the reference."""
    methods = [method for cls in CLASSES for method in public_methods(cls)]
    for value in {*CLASSES, *FUNCTIONS, *methods, check_algorithm}:
        for block in blocks(inspect.cleandoc(value.__dict__.get("__doc__") or value.__doc__ or "")):
            yield pytest.param(block.text, id=value.__qualname__)


EXAMPLES = sorted(examples(), key=lambda example: example.id)


def test_the_main_entries_have_examples() -> None:
    names = {example.id for example in EXAMPLES}
    assert names >= {"Algorithm", "Experiment", "Tracker", "run", "compare", "sweep", "generate"}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("docstring_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    exec(compile(example, "docstring", "exec"), module.__dict__)


def test_table_of_hooks_names_their_arguments() -> None:
    table = (REPO / "docs" / "adding.md").read_text().split("| hook | returns |")[1]
    named = dict(re.findall(r"`(\w+)\(([\w, ]*)\)`", table.split("\n\n")[0]))
    assert len(named) > 20
    for name, arguments in named.items():
        parameters = list(inspect.signature(getattr(Algorithm, name)).parameters)
        assert arguments.split(", ") == parameters[1:], name
