"""`bigbatch compare`, `report` and `replay`, which read the logs of runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from bigbatch.cli import COMMANDS
from bigbatch.errors import SettingError, printable
from bigbatch.log.atomic_files import expanded_path, require_own_file
from bigbatch.log.history import (
    History,
    Table,
    find_runs,
    group_seeds,
    history_of,
    measured_rows,
    missing_text,
    seeds_of,
    table_of,
)
from bigbatch.log.html_report import require_ending, write_report, write_text
from bigbatch.log.paired_differences import differences_of, require_reference
from bigbatch.log.replay import chart_of_replays, table_of_replay, time_in_words
from bigbatch.log.replay import replay as replay_policies
from bigbatch.log.text_table import terminal_width, text_table, wrapped
from bigbatch.log.time_to_score import ScoreTargets
from bigbatch.policies.controller import Controller
from bigbatch.policies.parse import POLICIES, parse_policy
from bigbatch.setting_types import parse_setting

_CONTROLLER = {  # options of `replay`, with their help
    "decide_every": "steps between two decisions [1]",
    "smoothing": 'window of averages: "16 steps", "4K samples", "auto" or none [auto]',
    "dead_band": "relative change that is too small to follow: 0.1 for 10 %% [0]",
    "max_change": 'largest factor of one change, "auto" for the policy\'s own, or none [auto]',
    "warmup": 'time before the first decision: "500 steps", "8K samples", "1 epoch"',
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; {self.prog} --help lists the options")


_EXAMPLES = {
    "compare": "  bigbatch compare runs/digits-1 runs/digits-2\n"
    "  bigbatch compare runs/digits-1 --against simigrad   differences from one arm\n"
    "  bigbatch compare runs/digits-1 --to 85 --to 90      the time to these scores",
    "report": "  bigbatch report runs/digits-1                  into the folder itself\n"
    "  bigbatch report runs/digits-1 -o curves.svg    the curves as a figure\n"
    "  bigbatch report runs/digits-1 runs/digits-2 -o both.html",
    "replay": "  bigbatch replay runs/digits-1/simigrad-seed0 --policy simigrad:target=0.5\n"
    '  bigbatch replay RUN --policy "schedule:32, x2 every 8K samples"',
}
_MORE = {  # of the descriptions, after what the list of commands says
    "compare": " Runs that differ in their seed are one row.",
    "replay": " Signal and noise are\n"
    "those of the log, whatever the batch size; see docs/policies.md.",
}
_OUT = {
    "report": "a .html page, or a .svg figure of the curves",
    "replay": "a .svg figure of batch sizes",
}


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of `compare`, `report` or `replay`."""
    parser = _Parser(
        f"bigbatch {name}",
        description=COMMANDS[name] + _MORE.get(name, ""),
        epilog=f"examples:\n{_EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    folder = "folder of a log, or of such folders"
    add("runs", nargs="+", metavar="RUN", type=expanded_path, help=folder)
    if name in _OUT:
        add("-o", "--out", type=expanded_path, help=f"{_OUT[name]}; replaces only bigbatch's own")
    if name == "replay":
        policies = f"a policy, may be repeated: {', '.join(POLICIES)}"
        form = "NAME:KEY=VALUE,..."
        add("--policy", action="append", required=True, metavar=form, help=policies)
        group = parser.add_argument_group("the controller of each policy")
        for option, text in _CONTROLLER.items():
            group.add_argument(f"--{option.replace('_', '-')}", metavar="VALUE", help=text)
    else:
        scores = "show steps, samples and seconds to this score; may be repeated"
        add("--against", metavar="ARM", help="show the others' differences from it [the first]")
        add("--to", action="append", type=float, metavar="SCORE", help=scores)
    return parser


def compare(arguments: Sequence[str]) -> None:
    """Runs `bigbatch compare`."""
    options = _options("compare", arguments)
    targets = ScoreTargets(options.to) if options.to else None
    histories = _histories(options.runs)
    require_reference(options.against, group_seeds(histories))
    times = targets and targets.table(histories)
    differences = differences_of(histories, options.against)
    _show(table_of(histories), seeds_of(histories))
    if differences is not None:
        _show(differences.table(), differences.title)
    if targets and times:
        _show(times, targets.title(histories))


def report(arguments: Sequence[str]) -> None:
    """Runs `bigbatch report`."""
    options = _options("report", arguments)
    if options.out is None and len(options.runs) > 1:
        raise SettingError("several runs have no common place for their report; name it with -o")
    out: Path = options.out or options.runs[0] / "report.html"  # which is ours, whoever wrote it
    require_ending(out)
    if options.out is not None:
        require_own_file(out)
    if out.suffix == ".svg" and (options.against or options.to):
        name = "--against" if options.against else "--to"
        raise SettingError(f"-o {out} does not go together with {name}; leave it out")
    targets = ScoreTargets(options.to) if options.to else None
    histories = _histories(options.runs)
    require_reference(options.against, group_seeds(histories))
    title = " and ".join(path.resolve().name for path in options.runs)
    write_report(histories, out, title, against=options.against, targets=targets)
    _print(f"report: {out}")


def replay(arguments: Sequence[str]) -> None:
    """Runs `bigbatch replay`."""
    options = _options("replay", arguments)
    policies = {text: parse_policy(text) for text in options.policy}
    kinds = get_type_hints(Controller.__init__, include_extras=True)
    given: dict[str, Any] = {
        name: parse_setting(name, text, kinds[name])
        for name in _CONTROLLER
        if (text := getattr(options, name)) is not None
    }
    if options.out is not None:
        require_ending(options.out, (".svg",))
        require_own_file(options.out)
    histories = _histories(options.runs)
    measured = [history for history in histories if measured_rows(history.rows)]
    for history in histories:
        if measured and history not in measured:
            _print(f"{history.path.name}: nothing is measured yet; left out")
    replays = [replay_policies(one, policies, **given) for one in measured or histories]
    for one in replays:
        samples = f"{one.trace.samples:,} samples{missing_text([one.history])}"
        _show(table_of_replay(one), f"{one.history.label}: {samples}")
        _print(f"{time_in_words(one)}\n")
    if options.out is not None:
        write_text(options.out, chart_of_replays(replays))
        _print(f"figure: {options.out}")


def _histories(paths: Sequence[Path]) -> list[History]:
    return [history_of(run) for path in paths for run in find_runs(path)]


def _options(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the other ranks of a launch, since one reads the logs."""
    options = parser_of(name).parse_args(arguments)
    if os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    return options


def _show(table: Table, title: str) -> None:
    sys.stdout.write(f"{printable(text_table(table, title, terminal_width()))}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{wrapped(printable(text))}\n")
