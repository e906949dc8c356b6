"""Four tasks of GLUE in their official layout: one text or two, and a class."""

import csv
import gzip
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.files import UTF_8, DatasetLocation, readable, text_of
from bigbatch_recipes.settings import require_choice

_ARCHIVE = "glue.tar.gz"
_PLAIN = {"0": 0, "1": 1}


@dataclass(frozen=True)
class Task:
    """The layout of a task's file."""

    columns: int  # number of columns
    texts: tuple[int, ...]  # columns of the text, or of the two texts
    label: int  # column of the class
    classes: dict[str, int]  # number of each class, by its name in the file
    has_header: bool = True  # whether the first line names the columns


TASKS = {
    "SST-2": Task(2, (0,), 1, _PLAIN),
    "CoLA": Task(4, (3,), 1, _PLAIN, has_header=False),
    "MRPC": Task(5, (3, 4), 0, _PLAIN),
    "RTE": Task(4, (1, 2), 3, {"not_entailment": 0, "entailment": 1}),
}

ORIGIN = DatasetLocation(
    "GLUE",
    folders=("glue",),
    files=(*(f"{name}/train.tsv" for name in TASKS), _ARCHIVE),
    other_files=("dev.tsv in the same folder",),
    source=f"TASK.zip from gluebenchmark.com, unpacked ({_ARCHIVE}: a folder glue of these)",
    size=", ".join(TASKS),
)

Rows = list[tuple[tuple[str, ...], int]]


def read_task(folder: Path, name: str, split: str) -> Rows:
    """Texts and class of each row.

    Args:
        folder: a folder with a folder of each task, or with glue.tar.gz, whose glue/ has these.
        name: a name of `TASKS`.
        split: "train" or "dev".
    """
    require_choice("GLUE task", name, TASKS)
    task, file = TASKS[name], f"{name}/{split}.tsv"
    lines = csv.reader(
        io.StringIO(_text(folder, file), newline=""), delimiter="\t", quoting=csv.QUOTE_NONE
    )
    if task.has_header:
        next(lines, None)
    return [
        _row(row, task, f"{file} in {folder}, row {number}") for number, row in enumerate(lines)
    ]


def _text(folder: Path, file: str) -> str:
    path, archive = folder / file, folder / _ARCHIVE
    if path.exists():
        return text_of(path)
    if archive.exists():
        with readable(archive):
            unzipped = io.BytesIO(gzip.decompress(archive.read_bytes()))  # checks the checksum
            with tarfile.open(fileobj=unzipped) as tar:
                name = f"glue/{file}"
                member = tar.extractfile(name) if name in tar.getnames() else None
                if member is not None:
                    return member.read().decode(UTF_8)
    raise ORIGIN.missing_file(path)


def _row(row: list[str], task: Task, position: str) -> tuple[tuple[str, ...], int]:
    if len(row) != task.columns or row[task.label] not in task.classes:
        raise RunError(
            f"{position}, is {row!r}; need {task.columns} columns, the one at {task.label} of "
            f"{', '.join(task.classes)}"
        )
    return tuple(row[column] for column in task.texts), task.classes[row[task.label]]
