"""A release: one version everywhere, true badges, a wheel that trains in a fresh environment."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import bigbatch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIFF = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
LOOP = "\n".join(line[1:] for line in DIFF if line[0] != "-")


def test_changelog_and_citation_have_the_version_of_the_package():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, day = re.search(r"(?m)^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changelog).groups()
    recipes = tomllib.loads((ROOT / "recipes/pyproject.toml").read_text())["project"]
    assert bigbatch.__version__ == version == recipes["version"]
    assert f"bigbatch=={version}" in recipes["dependencies"]
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (version, day) == (citation["version"], str(citation["date-released"]))
    assert PROJECT["license"] == citation["license"]


def test_the_badges_are_true():
    pythons = [text.split()[-1] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    (torch,) = (one for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert [
        f"python-{pythons[0]}_to_{pythons[-1]}-blue",
        f"torch-{torch.removeprefix('torch>=')}_or_newer-blue",
        f"license-{PROJECT['license']}-blue",
        "types-mypy_strict-blue",
    ] == re.findall(r"img\.shields\.io/badge/(.*)\)", README)
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["strict"]


def test_forms_for_issues_are_read_as_yaml():
    yaml = pytest.importorskip("yaml")
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")]
    assert 3 == len(forms)
    assert all(form.get("body") or "blank_issues_enabled" in form for form in forms)


@pytest.mark.release
def test_a_wheel_is_installed_by_pip_and_runs_the_readmes_loop(tmp_path):
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, *pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("bigbatch-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for ending in ("py.typed", "kernels/kernels.c", "log/chart.css"):
        assert any(name.endswith(ending) for name in names), ending
    assert not [name for name in names if "recipes" in name or "studies" in name]
    venv.create(tmp_path / "new", with_pip=True)
    python = tmp_path / "new/bin/python"
    constraints = ["-c", ROOT / "constraints.txt"]
    needed = [wheel, "scikit-learn"]
    subprocess.run([python, *pip, "install", *constraints, *needed], check=True, cwd=tmp_path)
    command = [tmp_path / "new/bin/bigbatch", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert f"bigbatch {bigbatch.__version__}\n" == version.stdout
    loop = subprocess.run(
        [python, "-c", f"{LOOP}\nassert '{tmp_path}' in bb.__file__"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "epoch=7" in loop.stdout, loop.stderr
