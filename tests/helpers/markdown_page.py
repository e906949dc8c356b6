"""Runs the code blocks of a page in order, in this process: python markdown_page.py PAGE.

docs/developer/index.md says what the block of each language must be able to do.
"""

import json
import shlex
import sys
import tomllib
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser
from torch.distributed.run import get_args_parser

from bigbatch.cli import log_commands
from bigbatch.cli.advise_command import argument_parser

ROOT = Path(__file__).parents[2]
SNIPPET = "--8<--"  # a file that the site includes, which a test of its own runs


def execute(example: Example, code: str, namespace: dict[str, Any]) -> None:
    above = "\n" * (example.line + example.parsed.line_offset)  # lines of a traceback
    exec(compile(above + code, example.path, "exec"), namespace)


def run_python(example: Example) -> None:
    if not example.parsed.startswith(SNIPPET):
        execute(example, example.parsed, example.namespace)


def run_both_sides(example: Example) -> None:
    """Runs the lines before a change in a copy of the namespace, then those after it."""
    lines = example.parsed.splitlines()
    wrong = [line for line in lines if line and line[0] not in "+- "]
    assert not wrong, f"a line of a diff begins with +, - or a space: {wrong}"
    for sign, namespace in (("-", dict(example.namespace)), ("+", example.namespace)):
        code = "\n".join(line[1:] if line[:1] in (" ", sign) else "" for line in lines)
        execute(example, code, namespace)


def parse_commands(example: Example) -> None:
    """Lets the programs' own parsers read the commands of a block."""
    command = ""
    for line in example.parsed.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        if command.count('"') % 2 == 0:  # a quotation may be longer than a line
            parse_command(shlex.split(command, comments=True))
            command = ""
    assert not command, f"a quotation does not end: {command}"


def parse_command(words: list[str]) -> None:
    """Raises if a program of ours, torch's launcher or make would refuse these words."""
    while words and "=" in words[0]:  # variables of the environment
        words = words[1:]
    match words:
        case ["torchrun", *arguments]:
            options = get_args_parser().parse_args(arguments)
            module = ["-m"] if options.module else []
            program = [*module, options.training_script, *options.training_script_args]
            parse_command(["python", *program])
        case ["python", "-m", str(module), *arguments] if module.startswith("studies."):
            parse_study(module, arguments)
        case ["python", "-m", *program]:
            parse_command(program)
        case ["python", str(script), *_] if script.startswith("examples/"):
            assert (ROOT / script).exists(), script
        case ["bigbatch"] | ["bigbatch", "--help" | "--version"]:
            pass
        case ["bigbatch", "advise", *arguments]:
            argument_parser().parse_args(arguments)
        case ["bigbatch", "compare" | "report" | "replay" as command, *arguments]:
            log_commands.parser_of(command).parse_args(arguments)
        case ["bigbatch", "train" | "sweep" | "list" as command, *arguments]:
            parse_recipe_command(command, arguments)
        case ["bigbatch", *_]:
            raise AssertionError(f"there is no such command: {words}")
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                assert "=" in target or f"\n{target}:" in makefile, target


def parse_recipe_command(command: str, arguments: list[str]) -> None:
    """Lets a command of the recipes read its arguments."""
    module = {"list": "recipe_list"}.get(command, f"{command}_command")
    parser = getattr(import_module(f"bigbatch_recipes.cli.{module}"), f"{command}_parser")()
    if "--help" not in arguments:
        parser.parse_args(arguments)


class _ParsedError(Exception):
    """The arguments of a study are read; it shall not run."""


def parse_study(name: str, arguments: list[str]) -> None:
    """Lets a study read its arguments, up to the point where it would begin."""

    def parse_and_stop(parser: ArgumentParser, *given: Any, **options: Any) -> None:
        parse(parser, *given, **options)
        raise _ParsedError

    sys.path.append(str(ROOT))
    module = import_module(name)
    module = import_module(f"{name}.__main__") if hasattr(module, "__path__") else module
    parse, ArgumentParser.parse_args = ArgumentParser.parse_args, parse_and_stop
    try:
        module.main(arguments)
    except _ParsedError:
        return
    finally:
        ArgumentParser.parse_args = parse
    raise AssertionError(f"{name} parsed no arguments")


EVALUATORS = {
    "python": run_python,
    "diff": run_both_sides,
    "sh": parse_commands,
    "json": lambda example: json.loads(example.parsed) and None,
    "toml": lambda example: tomllib.loads(example.parsed) and None,
    "yaml": lambda example: yaml.safe_load(example.parsed) and None,
}


def main(page: Path) -> None:
    parsers = [CodeBlockParser(language, run) for language, run in EVALUATORS.items()]
    for example in Sybil(parsers).parse(page).examples():
        example.evaluate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
