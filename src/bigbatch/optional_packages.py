"""Optional packages, and the command that installs a missing one."""

import re
from importlib import import_module
from types import ModuleType

from bigbatch.errors import MissingPackageError

_OF_EXTRA = re.compile(r'(?P<requirement>[^;]+); extra == "(?P<extra>[\w-]+)"')
_NESTED = re.compile(r"bigbatch\[(?P<extras>[\w,-]+)\]")


def import_optional(package: str, extra: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: the name to import.
        extra: the extra of bigbatch that installs it.
    Raises:
        MissingPackageError: the package is not installed; names the command that installs it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        if (error.name or "").partition(".")[0] != name:
            raise  # the package is installed, and one that it needs is not
        raise MissingPackageError(
            f"bigbatch[{extra}] needs {name}, which is not installed; run: {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, from any folder.

    If bigbatch is not installed, and so has no metadata, the command is for the source folder.
    """
    quoted = [f'"{requirement}"' for requirement in requirements(extra)]
    return f"pip install {' '.join(quoted)}" if quoted else f'pip install ".[{extra}]"'


def requirements(extra: str) -> list[str]:
    """The packages of an extra with their versions, from the metadata of the installed bigbatch.

    Example:
        >>> "typer>=0.29" in requirements("cli")
        True
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow, and rarely needed

    try:
        listed = requires("bigbatch") or []
    except PackageNotFoundError:
        return []
    packages: set[str] = set()
    for match in filter(None, map(_OF_EXTRA.fullmatch, listed)):
        if match["extra"] != extra:
            continue
        if nested := _NESTED.fullmatch(match["requirement"]):
            packages.update(*map(requirements, nested["extras"].split(",")))
        else:
            packages.add(match["requirement"])
    return sorted(packages)
