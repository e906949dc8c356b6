"""Optional packages, and what to say where one is missing."""

from importlib import import_module
from types import ModuleType

from bigbatch.errors import MissingPackageError


def required(package: str, extra: str) -> ModuleType:
    """The imported package.

    Args:
        package: its name.
        extra: of ours that brings it.
    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise  # it is there, and lacks something itself
        raise MissingPackageError(
            f"bigbatch.integrations needs {package}, which is not installed; run: "
            f'pip install "bigbatch[{extra}]"'
        ) from error
