"""A run directory: all files of one training of a recipe.

    settings.json    the settings, and the versions that ran
    metrics.jsonl    the log, which `bigbatch.RunLog` writes
    checkpoint.pt    the latest checkpoint, with its digest
    events/          the metrics for TensorBoard
    report.html      the report
    launch.txt       the launch of torchrun that began it
    log.txt          standard error of a training that a sweep started
    vocab.txt        the vocabulary of a language model, for runs that begin with its weights

A folder of runs is a study; it has a study.json instead. Both are created atomically.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigbatch.digest import load_state, save_state
from bigbatch.errors import RunError, StateError
from bigbatch.log.atomic_files import open_atomically, write_atomically
from bigbatch.log.history import history_of, read_settings
from bigbatch.log.run_log import RunLog, settings_json
from bigbatch_recipes.new_directory import LAUNCH, create_directory_atomically


class RunDirectory:
    """The files of one training.

    Attributes:
        name: name of the directory.
        log: writes the rows; the first one locks the directory.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.name = path, path.name
        self.settings = {k: value for k, value in settings.items() if k != "higher_is_better"}
        is_higher = settings.get("higher_is_better", True)
        self.log = RunLog(
            path, settings=self.settings, higher_is_better=is_higher, tensorboard=True
        )
        self._text_digests: dict[str, str] = {}  # by file name

    @classmethod
    def create(
        cls, path: Path, settings: dict[str, Any], launch: str | None = None
    ) -> "RunDirectory":
        """Creates a run directory atomically, with the launch of torchrun that begins it."""
        run = cls(path, settings)
        with create_directory_atomically(path) as directory:
            write_atomically(directory / "settings.json", settings_json(run.log.settings))
            if launch:
                write_atomically(directory / LAUNCH, launch.encode())
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Opens an existing run directory."""
        return cls(path, read_settings(path))

    def save_texts(self, texts: Mapping[str, str]) -> None:
        """Writes texts that later runs need, by file name."""
        for name, text in texts.items():
            write_atomically(self.path / name, text.encode())
            self._text_digests[name] = file_digest(self.path / name)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint, which also has the position of the log; warns if it cannot."""
        if not self.log.flush():
            self._warn_not_written(self.log.write_errors["metrics"])
            return
        content = {"log": self.log.state_dict(), "kept": self._text_digests, "state": state}
        try:
            with open_atomically(self.path / "checkpoint.pt") as file:
                save_state(content, file)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            self._warn_not_written(error)
            return
        self.log.write_errors.pop("checkpoint", None)

    def _warn_not_written(self, error: Exception) -> None:
        self.log.warn_not_written("checkpoint", "the checkpoint could not be written", error)

    def require_all_written(self) -> None:
        """Checks at the end of a training that its files are complete.

        Raises:
            RunError: metrics, the last checkpoint or events could not be written, or rows were
                deleted.
        """
        errors = self.log.write_errors
        if not errors:
            self._require_all_rows()
            return
        names, reason = errors.keys(), next(iter(errors.values()))
        remedy = f", then bigbatch train --resume {self.path} repeats the steps that are missing"
        raise RunError(
            f"{self.path} is trained to its end, but not all of its {', '.join(names)} could be "
            f"written ({reason}); make room" + remedy * (names != {"events"})
        )

    def _require_all_rows(self) -> None:
        steps, rows = self.log.state_dict()["step"], len(history_of(self.path).rows)
        if rows < steps:
            raise RunError(
                f"{self.log.metrics} has rows of {rows:,} of the {steps:,} steps: another program "
                "deleted or truncated it; restore the others from a copy, or train again elsewhere"
            )

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The latest checkpoint, None before the first; the log continues after its step."""
        position, state = self._read_checkpoint() or ({"step": 0, "samples": 0}, None)
        self.log.load_state_dict(position)
        self.log.open()
        return state

    def load_weights(self) -> dict[str, Any] | None:
        """The model's state in the latest checkpoint, None before the first; changes no file.

        Raises:
            RunError: the file is damaged.
        """
        checkpoint = self._read_checkpoint()
        if checkpoint is None:
            return None
        model = checkpoint[1].get("model")
        if not isinstance(model, dict):
            raise RunError(f"{self.path / 'checkpoint.pt'} has no weights; name another run")
        return model

    def _read_checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(position of the log, state); None before the first one."""
        file = self.path / "checkpoint.pt"
        if not file.exists():
            return None
        try:
            with file.open("rb") as stream:
                checkpoint = load_state(stream, str(file))
            require_digests(self.path, checkpoint["kept"])
            return dict(checkpoint["log"]), dict(checkpoint["state"])
        except StateError as error:
            raise RunError(
                f"{error}; restore it from a copy, or delete {file.name} to start the run again"
            ) from None
        except Exception as error:
            raise RunError(
                f"{file} cannot be loaded ({type(error).__name__}); delete it to start the run "
                "again"
            ) from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_digests(folder: Path, saved: Mapping[str, str]) -> None:
    """Checks every file that has a digest; other files do not count.

    Raises:
        StateError: a file is gone, or its bytes have changed.
    """
    for name, digest in saved.items():
        path = folder / name
        if not path.is_file():
            raise StateError(f"{path} is gone")
        if file_digest(path) != digest:
            raise StateError(f"{path} is damaged: its SHA-256 is not the one that was saved")
