"""The state of a training in the folder of a checkpoint, one file of each process."""

from pathlib import Path
from typing import Any

from bigbatch.digest import load_state, save_state
from bigbatch.errors import StateError

_FILE = "adaptive_batch_{}.pt"


def save(folder: Path, rank: int, epochs: int, state: dict[str, Any]) -> None:
    """Saves the state of one process.

    Args:
        folder: of the checkpoint.
        rank: of the process.
        epochs: that are over, one whose samples are all done included.
        state: of its AdaptiveBatch.
    """
    with (folder / _FILE.format(rank)).open("wb") as file:
        save_state({"epochs": epochs, "train": state}, file)


def load(folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
    """The epochs and the state of this process, or of the first where there were fewer.

    Raises:
        StateError: the checkpoint has none, or its file is damaged.
    """
    for file in (folder / _FILE.format(rank), folder / _FILE.format(0)):
        if file.exists():
            with file.open("rb") as opened:
                saved = load_state(opened, str(file))
            return saved["epochs"], saved["train"]
    raise StateError(
        f"{folder} has no {_FILE.format(0)}: AdaptiveTrainer did not save it, or with "
        "save_only_model=True; load the model from it, and train without resume_from_checkpoint"
    )
