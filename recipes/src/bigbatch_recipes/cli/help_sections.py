"""Help with headings: options by their sections, commands by theirs, examples line by line."""

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _WithExamples:
    """A paragraph of the help that begins with a command has examples, and is not wrapped."""

    help: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = self.help and self.help.replace("\n\nbigbatch ", "\n\n\b\nbigbatch ")


class SectionedCommand(_WithExamples, TyperCommand):
    """A command whose help has a heading for each `rich_help_panel` of its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, options without a section, then each section."""
        _write_sections(formatter, self.get_params(ctx), ctx)


class SectionedGroup(_WithExamples, TyperGroup):
    """A group whose help has a heading for each `rich_help_panel` of its commands.

    Without a command it shows its help, and exits with 2.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left."""
        if not args:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands, then the options."""
        commands: dict[str, Any] = {**self.commands}
        rows = [
            (command.rich_help_panel or "Commands", (name, _first_line(command)))
            for name, command in commands.items()
        ]
        width = max(len(name) for name in commands)
        _write(formatter, ((section, (name.ljust(width), text)) for section, (name, text) in rows))
        _write_sections(formatter, self.get_params(ctx), ctx)


def _write_sections(formatter: Any, params: Iterable[Any], ctx: Any) -> None:
    headings = {"argument": "Arguments", "option": "Options"}
    _write(
        formatter,
        (
            (param.rich_help_panel or headings[param.param_type_name], record)
            for param in params
            if (record := param.get_help_record(ctx)) is not None
        ),
    )


def _write(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Writes rows of name and text under their headings, in the order of each heading's first."""
    by_heading: dict[str, list[tuple[str, str]]] = {}
    for heading, row in rows:
        by_heading.setdefault(heading, []).append(row)
    for heading, section in by_heading.items():
        with formatter.section(heading):
            formatter.write_dl(section)


def _first_line(command: Any) -> str:
    text: str = command.help or ""
    return text.strip().partition("\n\n")[0].replace("\n", " ")
