"""Runs the code blocks of a page in order, in this process: python markdown_page.py PAGE.

docs/developer/index.md says what the block of each language must be able to do.
"""

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser
from torch.distributed.run import get_args_parser

from bigbatch.cli.advise_command import argument_parser
from bigbatch.cli.log_commands import compare_parser, replay_parser, report_parser

ROOT = Path(__file__).parents[2]
OWN_PARSERS = {
    "advise": argument_parser,
    "compare": compare_parser,
    "report": report_parser,
    "replay": replay_parser,
}
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


def parse_recipe_command(name: str, arguments: list[str]) -> None:
    """Lets a command of the recipes read its arguments."""
    from bigbatch_recipes.cli.launched_command import typer_command
    from bigbatch_recipes.cli.recipe_list import list_recipes
    from bigbatch_recipes.cli.sweep_command import sweep
    from bigbatch_recipes.cli.train_command import train

    command = typer_command({"list": list_recipes, "train": train, "sweep": sweep}[name])
    command.make_context(name, list(arguments))


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
        case ["python", "-m", *program]:
            parse_command(program)
        case ["python", str(script), *_] if script.startswith("examples/"):
            assert (ROOT / script).exists(), script
        case ["bigbatch", name, *arguments] if name in OWN_PARSERS:
            OWN_PARSERS[name]().parse_args(arguments)
        case ["bigbatch", name, *arguments] if name in ("list", "train", "sweep"):
            parse_recipe_command(name, arguments)
        case ["bigbatch", option] if option in ("--help", "--version"):
            pass
        case ["bigbatch", *words]:
            raise ValueError(f"bigbatch has no command {words}")
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                assert "=" in target or f"\n{target}:" in makefile, target


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
