"""The state of a training in the folder of a checkpoint, one file per process."""

from pathlib import Path
from typing import Any

from bigbatch.digest import load_state, save_state
from bigbatch.errors import StateError

_FILE = "adaptive_batch_{}.pt"


def save(folder: Path, rank: int, epochs: int, state: dict[str, Any]) -> None:
    """Saves the state of one process.

    Args:
        folder: folder of the checkpoint.
        rank: rank of the process.
        epochs: finished epochs, with one whose samples are all used.
        state: state of the process's AdaptiveBatch.
    """
    with (folder / _FILE.format(rank)).open("wb") as file:
        save_state({"epochs": epochs, "train": state}, file)


def load(folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
    """Epochs and state of this process; those of the first process if no file has this rank.

    Raises:
        StateError: the checkpoint has no such file, or the file is damaged.
    """
    for file in (folder / _FILE.format(rank), folder / _FILE.format(0)):
        if file.exists():
            with file.open("rb") as stream:
                saved = load_state(stream, str(file))
            return saved["epochs"], saved["train"]
    raise StateError(
        f"{folder} has no {_FILE.format(0)}: AdaptiveTrainer did not save it, or saved it with "
        "save_only_model=True; load the model from it, and train without resume_from_checkpoint"
    )
