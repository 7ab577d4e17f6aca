"""The help of every command: headings, readable metavars, whole sentences, and examples that parse."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex

import click
import pytest
from support.commands import run

import h5chunk
from h5chunk import errors
from h5chunk.cli import main
from h5chunk.tools.convert.options import convert_options
from h5chunk.tools.repack.options import RepackOptions

COMMANDS = [*main.commands]
OWN = {"quiet", "as_json", "help"}  # of the command line alone
RENAMED = {"no_shuffle": "shuffle", "no_quotes": "quotes", "file": "path"}


def own_options(name: str) -> list[click.Option]:
    return [parameter for parameter in main.commands[name].params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    context = click.Context(main.commands[name])
    for option in own_options(name):
        assert getattr(option, "heading", ""), option.opts
        assert re.fullmatch(r"[A-Z].*\.", option.help or "", re.DOTALL), f"{option.opts}: {option.help}"
        shown, _ = option.get_help_record(context)
        assert not re.search(r"RANGE|INTEGER|FLOAT|TEXT|<|==", shown), shown


def test_summaries_are_whole() -> None:
    shown = run("--help").output
    assert "..." not in shown.partition("Commands:")[2] and all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_headings_and_examples(name: str) -> None:
    shown = run(name, "--help").output
    assert run(name, "-h").output == shown
    assert "\nOptions:" not in shown and "\nOutput:\n" in shown
    *_, examples = shown.split("\nExamples:\n")
    lines = re.findall(rf"^    h5chunk {name}\b.*$", examples, re.MULTILINE)
    assert 2 <= len(lines) <= 3 and lines == [f"    {line}" for line in main.commands[name].examples.values()]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str) -> None:
    for line in main.commands[name].examples.values():
        program, command, *arguments = shlex.split(line.split(" > ")[0])
        assert (program, command) == ("h5chunk", name)
        main.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_arguments_of_the_function(name: str) -> None:
    arguments = {*inspect.signature(getattr(h5chunk, name)).parameters}
    groups = {"convert": convert_options(), "repack": [RepackOptions]}
    arguments |= {option for options in groups.get(name, ()) for option in options.names()}
    for parameter in main.commands[name].params:
        python = RENAMED.get(parameter.name, parameter.name)
        if parameter.name in OWN:
            continue
        renamed = python in ("path", "output") and "source" in arguments
        assert python in arguments or renamed, f"{name}: {parameter.name}"


def test_options_of_the_same_name_look_the_same() -> None:
    shown: dict[str, set[str | None]] = {}
    for name in COMMANDS:
        context = click.Context(main.commands[name])
        for option in own_options(name):
            shown.setdefault(option.opts[0], set()).add(option.make_metavar(context))
    assert {option for option, metavars in shown.items() if len(metavars) > 1} == {"--compression"}


@pytest.mark.parametrize("name", COMMANDS)
def test_functions_that_help_mentions_exist(name: str) -> None:
    for function in re.findall(r"\b(h5chunk\.[\w.]+)\(", " ".join(run(name, "--help").output.split())):
        assert pkgutil.resolve_name(function)


def test_commands_and_errors_are_in_the_package() -> None:
    assert set(COMMANDS) <= set(h5chunk.__all__)
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.H5ChunkError):
            assert getattr(h5chunk, name) is value
