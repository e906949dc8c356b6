"""The command line: advise, compare, report and replay, and the commands of other packages.

Another package adds a command by an entry point of the group `bigbatch.commands`: a function that
takes the list of arguments and returns the exit status, None for 0. The first line of its docstring
is listed by `bigbatch --help`; its module must not import torch, which takes seconds.
"""

import atexit
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from bigbatch.interrupts import exit_on_interrupt, handle_interrupts, ignore_interrupts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

COMMANDS = {  # the first line of the help, by name
    "advise": "Runs your training script as it is, and advises a batch size.",
    "compare": "Shows the logs of runs in one table.",
    "report": "Writes a page of runs side by side: tables, curves, layers.",
    "replay": "Shows batch sizes and cost of other policies in a run.",
}
_START = """Usage: bigbatch COMMAND [OPTIONS] [ARGS]...

Chooses the batch size of a PyTorch training from its gradient noise.

  bigbatch advise train.py    advice for your own script: start with this
  bigbatch COMMAND --help     the options of a command
  bigbatch --version          the version
"""


def main() -> None:
    """Runs a command, or lists the commands. An interrupt prints one line at any moment.

    `advise` runs the user's program, whose own interrupts, warnings and ranks these are.
    """
    name, *arguments = sys.argv[1:] or [""]
    if name == "advise":
        from bigbatch.cli.advise_command import advise

        advise(arguments)
    with handle_interrupts(exit_on_interrupt):
        atexit.register(ignore_interrupts)  # while Python shuts down
        if name in ("", "-h", "--help", "--version"):
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(_version() if name == "--version" else _list())
            sys.exit(0 if name else 2)
        from bigbatch.cli.exit_status import run_command

        if name in COMMANDS:
            command = getattr(import_module("bigbatch.cli.log_commands"), name)
            sys.exit(run_command(command, arguments))
        sys.exit(run_command(partial(_run_other, name), arguments))


def _version() -> str:
    return f"bigbatch {import_module('bigbatch').__version__}\n"


def _list() -> str:
    """The commands under a heading for each package."""
    headings = {"Commands": dict(COMMANDS)}
    for package, name, help_text in _other_commands():
        headings.setdefault(f"Commands of {package}", {})[name] = help_text
    width = max(len(name) for commands in headings.values() for name in commands)
    parts = [_START]
    for heading, commands in headings.items():
        lines = (f"  {name:{width}}  {help_text}\n" for name, help_text in commands.items())
        parts.append(f"{heading}:\n{''.join(lines)}")
    return "\n".join(parts)


def _entry_points() -> "EntryPoints":
    from importlib.metadata import entry_points  # slow

    return entry_points(group="bigbatch.commands")


def _other_commands() -> Iterator[tuple[str, str, str]]:
    """Package, name and help of each command of another package."""
    for entry in _entry_points():
        package = entry.dist.name if entry.dist else entry.module
        try:
            text = entry.load().__doc__ or ""
        except ImportError as error:
            text = f"cannot be imported: {error}"
        yield package, entry.name, text.partition("\n")[0]


def _run_other(name: str, arguments: list[str]) -> int | None:
    """Runs a command of another package.

    Raises:
        SettingError: there is none of this name.
    """
    entries = {entry.name: entry for entry in _entry_points()}
    if name in entries:
        status: int | None = entries[name].load()(arguments)
        return status
    from bigbatch.errors import SettingError

    near = get_close_matches(name, [*COMMANDS, *entries], 1)
    advice = f"did you mean {near[0]!r}?" if near else "bigbatch --help lists them"
    raise SettingError(f"there is no command {name!r}; {advice}")
