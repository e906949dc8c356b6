"""Four tasks of GLUE in their official layout: one text or two, and a class."""

import csv
import gzip
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments.datasets.files import UTF_8, readable, text_of
from bigbatch.experiments.datasets.location import DatasetLocation

_ARCHIVE = "glue.tar.gz"
_PLAIN = {"0": 0, "1": 1}


@dataclass(frozen=True)
class Task:
    """Where in a row of a task's file things stand.

    Args:
        columns: how many a row has.
        texts: columns of the text, or of the two.
        label: column of the class.
        classes: by how the file names them.
        headed: whether the first line names the columns.
    """

    columns: int
    texts: tuple[int, ...]
    label: int
    classes: dict[str, int]
    headed: bool = True


TASKS = {
    "SST-2": Task(2, (0,), 1, _PLAIN),
    "CoLA": Task(4, (3,), 1, _PLAIN, headed=False),
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


def read_task(folder: Path, name: str, part: str) -> Rows:
    """Texts and class of each row.

    Args:
        folder: with a folder of each task, or with glue.tar.gz, in which glue/ has these.
        name: of `TASKS`.
        part: "train" or "dev".
    Raises:
        SettingError: there is no such task.
        RunError: a file is not there, or damaged.
    """
    if name not in TASKS:
        raise SettingError(f"GLUE task {name!r} is unknown; choose one of: {', '.join(TASKS)}")
    task, file = TASKS[name], f"{name}/{part}.tsv"
    lines = csv.reader(
        io.StringIO(_text(folder, file), newline=""), delimiter="\t", quoting=csv.QUOTE_NONE
    )
    if task.headed:
        next(lines, None)
    return [
        _row(row, task, f"{file} in {folder}, row {number}") for number, row in enumerate(lines)
    ]


def _text(folder: Path, file: str) -> str:
    """Of a file in the folder, or in the archive there."""
    plain, archive = folder / file, folder / _ARCHIVE
    if plain.exists():
        return text_of(plain)
    if archive.exists():
        with readable(archive):
            packed = io.BytesIO(gzip.decompress(archive.read_bytes()))  # all, for its checksum
            with tarfile.open(fileobj=packed) as tar:
                member = f"glue/{file}"
                inside = tar.extractfile(member) if member in tar.getnames() else None
                if inside is not None:
                    return inside.read().decode(UTF_8)
    raise ORIGIN.missing_file(plain)


def _row(row: list[str], task: Task, where: str) -> tuple[tuple[str, ...], int]:
    if len(row) != task.columns or row[task.label] not in task.classes:
        raise RunError(
            f"{where}, is {row!r}; need {task.columns} columns, the one at {task.label} of "
            f"{', '.join(task.classes)}"
        )
    return tuple(row[column] for column in task.texts), task.classes[row[task.label]]
