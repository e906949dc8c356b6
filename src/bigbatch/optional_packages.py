"""Optional packages, and the command that installs a missing one."""

import re
from importlib import import_module
from types import ModuleType

from bigbatch.errors import MissingPackageError

_OF_EXTRA = re.compile(r'(?P<requirement>[^;]+); extra == "(?P<extra>[\w-]+)"')
_NESTED = re.compile(r"bigbatch[\w-]*\[(?P<extras>[\w,-]+)\]")


def import_optional(package: str, extra: str, distribution: str = "bigbatch") -> ModuleType:
    """Imports an optional package.

    Args:
        package: the name to import.
        extra: the extra that installs it.
        distribution: the distribution that has the extra.
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
            f"{distribution}[{extra}] needs {name}, which is not installed; run: "
            f"{install_command(extra, distribution)}"
        ) from error


def install_command(extra: str, distribution: str = "bigbatch") -> str:
    """The command that installs the packages of an extra, from any folder.

    If the distribution is not installed, and so has no metadata, the command is for the folder of
    its source.
    """
    quoted = [f'"{requirement}"' for requirement in requirements(extra, distribution)]
    return f"pip install {' '.join(quoted)}" if quoted else f'pip install ".[{extra}]"'


def requirements(extra: str, distribution: str = "bigbatch") -> list[str]:
    """The packages of an extra with their versions, from the metadata of the distribution.

    Example:
        >>> "ninja>=1.11" in requirements("deepspeed")
        True
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow, and rarely needed

    try:
        listed = requires(distribution) or []
    except PackageNotFoundError:
        return []
    packages: set[str] = set()
    for match in filter(None, map(_OF_EXTRA.fullmatch, listed)):
        if match["extra"] != extra:
            continue
        if nested := _NESTED.fullmatch(match["requirement"]):
            for each in nested["extras"].split(","):
                packages.update(requirements(each, distribution))
        else:
            packages.add(match["requirement"])
    return sorted(packages)
