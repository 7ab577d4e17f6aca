"""Options and commands that messages name exist, and messages cap their lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import h5chunk
from h5chunk.cli import main

ROOT = Path(h5chunk.__file__).parent
COMMANDS = {name: command for name, command in main.commands.items() if isinstance(command, click.Command)}
OPTIONS = {
    name: {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for name, command in COMMANDS.items()
}
OTHERS = {"torchrun", "pip", "h5repack", "docker"}  # programs other than h5chunk, whose options messages may name
BOUNDED = {"known", "kinds", "choices"}  # variables that hold a few names that h5chunk defines


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of a module except docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(_text, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
            yield node.lineno, node.value


def _text(part: ast.expr) -> str:
    """Return a part of a formatted string; a variable is its name in braces, such as {convert}."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return f"{{{value.id}}}" if isinstance(value, ast.Name) else "{}"


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def missing_options(text: str, default: str = "") -> list[str]:
    """Return the options that a message names but the command does not have.

    The command is the one that precedes the option in the message, or else ``default``, or else any.
    """
    missing, command = [], default
    for name, option in re.findall(r"(?:h5chunk |{)([a-z]+)|(?<![\w-])(--[a-z][a-z-]*[a-z])", text):
        if name:
            command = name if name in COMMANDS else command
        elif option not in OPTIONS.get(command, ()):
            missing += [f"{command} {option}"] if command else []
            missing += [] if command or any(option in of for of in OPTIONS.values()) else [f"no command {option}"]
    return missing


def default_command(path: Path) -> str:
    """Return the command whose folder in ``tools`` has a module; empty for other modules."""
    folder = path.relative_to(ROOT).parts[1:2] if path.is_relative_to(ROOT / "tools") else ()
    return folder[0] if folder and folder[0] in COMMANDS else ""


def wrong_remedies(source: str, default: str = "") -> list[str]:
    """Return the options, commands and lists of messages in a module that are wrong."""
    tree, wrong = ast.parse(source), []
    for line, text in texts(tree):
        if " " in text and not any(re.search(rf"\b{program}\b", text) for program in OTHERS):
            named = re.findall(r"\b(?:run|use) h5chunk ([a-z]+)", text)
            wrong += [f"{line}: there is no command {name}" for name in named if name not in COMMANDS]
            wrong += [f"{line}: {missing}" for missing in missing_options(text, default)]
    return wrong + [f"{line}: a list without a limit" for line in unbounded_lists(tree)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_option_and_command_in_a_message_exists(path: Path) -> None:
    assert wrong_remedies(path.read_text(), default_command(path)) == []


def test_wrong_remedies_would_be_found() -> None:
    assert wrong_remedies("x = 'name the codec (--codec)'", "info") == ["1: info --codec"]
    assert wrong_remedies("x = f'{y}: run h5chunk verify FILE --mend'") == ["1: verify --mend"]
    assert wrong_remedies("x = 'run h5chunk mend FILE'") == ["1: there is no command mend"]
    assert wrong_remedies("x = 'run h5chunk verify FILE --repair'") == []
    assert wrong_remedies("raise E(', '.join(names))") == ["1: a list without a limit"]
    assert wrong_remedies("raise E(', '.join(names[:8]), names_text(names))") == []


def unbounded_lists(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of raise statements that list names without a limit.

    A list has a limit if it is a slice, a constant, or in `BOUNDED`.
    """
    for node in ast.walk(tree):
        for call in ast.walk(node) if isinstance(node, ast.Raise) else ():
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "join"):
                continue
            is_list = isinstance(call.func.value, ast.Constant) and str(call.func.value.value).strip() in (",", "and")
            names = {part.id for part in ast.walk(call) if isinstance(part, ast.Name)}
            has_limit = any(isinstance(part, (ast.Slice, ast.Tuple)) for part in ast.walk(call))
            if is_list and not has_limit and not any(name.isupper() or name in BOUNDED for name in names):
                yield call.lineno
