"""Changes the library in one place at a time, and lists the changes that no test notices.

    python tests/mutation.py map [TESTS]    notes which lines each test runs, on ranks too
    python tests/mutation.py run            makes 200 mutants, lists those that no test notices
    python tests/mutation.py run --files optim/base_step.py training/step.py      of these files

A mutant has one comparison, operation, condition, constant or statement replaced or removed. The
tests that run its line run until one fails: first those without ranks, and of these first those
that run few other lines. Messages, annotations and docstrings are not changed.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bigbatch"
MAP_FOLDER = ROOT / ".mutation"
FOLDERS = {  # mutants of each, of 200
    "gradients": 22, "statistics": 23, "policies": 35, "data": 20, "training": 25,
    "optim": 45, "integrations/deepspeed": 30,
}  # fmt: skip
SECONDS = 60  # of tests, as `map` timed them, that one mutant gets before it counts as a survivor
FIRST = 30  # tests before all others are collected: they kill most mutants

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
SLOW_TO_IMPORT = [  # by tests: once, before all mutants
    *["torch._inductor.compile_fx", "transformers", "deepspeed", "lightning", "accelerate"],
    *["sklearn.datasets", "sklearn.metrics", "sklearn.model_selection", "scipy.stats"],
    *["matplotlib.pyplot", "hypothesis", "pytorch_optimizer", "torch.utils.tensorboard"],
]
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One chunk of a file, as lines and columns, and what stands there instead."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    def source(self) -> str:
        lines = (SOURCE / self.file).read_text().splitlines(keepends=True)
        (first, start), (last, end) = self.start, self.end
        changed = lines[first - 1][:start] + self.after + lines[last - 1][end:]
        return "".join([*lines[: first - 1], changed, *lines[last:]])

    def lines(self) -> list[str]:
        """As `map` names them."""
        return [f"{self.file}:{line}" for line in range(self.start[0], self.end[0] + 1)]

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]} `{_short(self.before)}` -> `{_short(self.after)}`"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


# mutants


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant of the functions in one file."""
    name, text = str(file.relative_to(SOURCE)), file.read_text()
    mutants = []
    for node in _nodes(ast.parse(text), inside=False):
        for after in _replacements(node):
            before = ast.get_source_segment(text, node)
            end = (node.end_lineno, node.end_col_offset)
            start = (node.lineno, node.col_offset)
            mutants.append(Mutant(name, start, end, before, after))
    return mutants


def _nodes(node, inside):
    """Nodes inside functions, without messages, arguments, annotations and assertions."""
    excluded = ast.JoinedStr | ast.arguments | ast.AnnAssign | ast.Assert
    for child in ast.iter_child_nodes(node):
        if isinstance(child, excluded):
            continue
        if inside:
            yield child
        if not isinstance(child, ast.Raise):
            yield from _nodes(child, inside or isinstance(child, ast.FunctionDef))


def _replacements(node):
    """Replacements of a node, as text."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield _unparsed(node, ops=[SWAPPED[type(op)]()])
        case ast.BinOp(op=op, left=left) if type(op) in SWAPPED and not _is_text(left):
            yield _unparsed(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield _unparsed(node, op=SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield f"bool({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield str(value + 1)
        case ast.IfExp():
            yield _unparsed(node, body=node.orelse, orelse=node.body)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAME:
            yield _unparsed(node, func=ast.Name(OTHER_NAME[name]))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "pass"


def _unparsed(node, **changes) -> str:
    other = copy.copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def _is_text(node) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def sample_mutants(count: int, seed: int, files: list[str]) -> list[Mutant]:
    """A number of mutants at random: of these files, or of each folder its share."""
    if files:
        mutants = [mutant for name in files for mutant in mutants_of(SOURCE / name)]
        return random.Random(seed).sample(mutants, min(count, len(mutants)))
    sample, shares = [], sum(FOLDERS.values())
    for folder, share in FOLDERS.items():
        files = sorted((SOURCE / folder).rglob("*.py"))
        mutants = [mutant for file in files for mutant in mutants_of(file)]
        sample += random.Random(seed).sample(mutants, round(count * share / shares))
    return sample


# which tests run a line: this module is a plugin of pytest, too


def tracer():
    """A coverage of the folders with mutants, in memory."""
    import coverage

    include = [f"{SOURCE / folder}/*" for folder in FOLDERS]
    return coverage.Coverage(data_file=None, config_file=False, include=include)


def lines_by_context(traced) -> dict[str, set[str]]:
    """The lines that ran in each context; coverage's own first one is empty."""
    lines, data = defaultdict(set), traced.get_data()
    for file in data.measured_files():
        name = str(Path(file).relative_to(SOURCE))
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                lines[context].add(f"{name}:{line}")
    return lines


class OnRank:
    """A function of a test on ranks, which leaves the lines that it ran in a file."""

    def __init__(self, function, folder):
        self.function, self.folder = function, folder

    def __call__(self, *arguments):
        traced = tracer()
        traced.start()
        try:
            return self.function(*arguments)
        finally:
            traced.stop()
            lines = sorted(lines_by_context(traced)[""])
            (self.folder / str(os.getpid())).write_text(json.dumps(lines))


class Recorder:
    """The plugin of `map`."""

    def __init__(self):
        self._traced = tracer()
        self._traced.start()
        self._tests = []  # rows of the map, but for the lines of this process

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        import ranks
        from tiers import is_on_ranks

        folder, plain = Path(tempfile.mkdtemp()), ranks._start
        ranks._start = lambda rank, count, store, function, arguments: plain(
            rank, count, store, OnRank(function, folder), arguments
        )
        self._traced.switch_context(item.nodeid)
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - begun
            ranks._start = plain
            lines = set().union(*(json.loads(file.read_text()) for file in folder.iterdir()))
            shutil.rmtree(folder)
            tiers = sorted({mark.name for mark in item.iter_markers()} & {"thorough", "release"})
            self._tests.append((item.nodeid, seconds, tiers, is_on_ranks(item), lines))

    def pytest_sessionfinish(self):
        self._traced.stop()
        own = lines_by_context(self._traced)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        with (MAP_FOLDER / f"map.{worker}").open("w") as file:
            for test, *rest, lines in self._tests:
                file.write(json.dumps([test, *rest, sorted(lines | own[test])]) + "\n")


class Ordered:
    """The plugin of a mutant's tests, which runs them in the order of their names here."""

    def __init__(self, names):
        self._place = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self._place[item.nodeid])


def pytest_configure(config):
    if os.environ.get("MUTATION_MAP"):
        config.pluginmanager.register(Recorder())


def record(arguments) -> None:
    """`map`: one run of the tests."""
    shutil.rmtree(MAP_FOLDER, ignore_errors=True)
    MAP_FOLDER.mkdir()
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/helpers")])
    command = [sys.executable, "-m", "pytest", "-p", "mutation", "-n", "2", "--dist", "worksteal"]
    marks = [] if arguments.everything else ["-m", "not release"]
    variables = {"MUTATION_MAP": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *marks, *arguments.tests], cwd=ROOT, env=os.environ | variables, check=False
    )


# a mutant and its tests


def tests_by_line(excluded: set[str]):
    """For each line the tests without and with ranks, but for these tiers.

    A test is (the number of lines that it runs, its seconds, its name).
    """
    without_ranks, on_ranks = defaultdict(set), defaultdict(set)
    for file in MAP_FOLDER.glob("map.*"):
        for row in file.read_text().splitlines():
            test, seconds, tiers, ranked, lines = json.loads(row)
            if not excluded & set(tiers):
                for line in lines:
                    (on_ranks if ranked else without_ranks)[line].add((len(lines), seconds, test))
    return without_ranks, on_ranks


def chosen_tests(candidates, seconds: float) -> list[str]:
    """Tests of up to so many seconds: first quick ones that run few lines, by function in turn."""
    cases, ordered = Counter(), []
    for lines, cost, test in sorted(candidates, key=lambda each: each[0] * each[1]):
        function = test.partition("[")[0]
        ordered.append((cases[function], lines * cost, cost, test))
        cases[function] += 1
    chosen, seconds_left = [], seconds
    for *_, cost, test in sorted(ordered):
        if cost <= seconds_left or not chosen:
            chosen.append(test)
            seconds_left -= cost
    return chosen


def outcome(mutant: Mutant, tests: list[str], seconds: float) -> str:
    """The outcome: "killed", "survived", or "hung", which a slow machine may cause, too."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "bigbatch"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / mutant.file).write_text(mutant.source())
        child = os.fork()
        if not child:
            _run(Path(folder), tests)
        until = time.monotonic() + 30 + 2 * seconds
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hung"


def _run(folder: Path, tests: list[str]) -> None:
    """Runs tests in this process, which ends with pytest's exit status."""
    os.setsid()
    log = os.open(MAP_FOLDER / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    paths = [str(folder), str(ROOT / "tests"), str(ROOT / "tests/helpers")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    for batch in filter(None, (tests[:FIRST], tests[FIRST:])):
        status = pytest.main([*options, *batch], plugins=[Ordered(batch)])
        if status:
            break
    os._exit(status)


def run(arguments) -> None:
    """`run`: a line for each mutant, then the count."""
    for name in SLOW_TO_IMPORT:
        import_module(name)
    kinds = tests_by_line(set(arguments.without))
    results, mutants = Counter(), sample_mutants(arguments.count, arguments.seed, arguments.files)
    mutants = mutants[arguments.part :: arguments.parts]
    for mutant in mutants:
        result = "not run"
        for by_line in kinds:
            candidates = set().union(*(by_line[line] for line in mutant.lines()))
            tests = chosen_tests(candidates, arguments.seconds)
            if tests and result in ("not run", "survived"):
                result = outcome(mutant, tests, arguments.seconds)
        results[result] += 1
        sys.stdout.write(f"{result:8} {mutant}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(mutants)}: {dict(results)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    mapped = commands.add_parser("map")
    mapped.add_argument("tests", nargs="*", help="files or folders; all where none is named")
    mapped.add_argument("--everything", action="store_true", help="tests of a release too")
    mapped.set_defaults(do=record)
    tried = commands.add_parser("run")
    tried.add_argument("--files", nargs="*", default=[], help="of src/bigbatch; default: folders")
    tried.add_argument("--count", type=int, default=200)
    tried.add_argument("--seed", type=int, default=0)
    tried.add_argument("--seconds", type=float, default=SECONDS)
    tried.add_argument("--without", nargs="*", default=["release"], help="tiers left out")
    tried.add_argument("--part", type=int, default=0, help="one of --parts, from 0")
    tried.add_argument("--parts", type=int, default=1, help="side by side")
    tried.set_defaults(do=run)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
