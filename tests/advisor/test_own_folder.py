"""A program in a folder of its own finds the user's files, and changes none of them."""

import json
import sys

import pytest

from torchrun import run

CASES = """
import json, os, shutil, sqlite3, sys, tempfile, traceback
from pathlib import Path
import numpy, torch
from bigbatch.advisor.own_folder import OwnFolder

for users, code in json.load(open(sys.argv[1])):
    if os.fork() == 0:  # torch is imported once
        users = Path(users)
        sys.stdout = sys.stderr = open(users.parent / "output.txt", "w")
        folder = OwnFolder(users.parent / "own", users)
        folder.make()
        folder.enter()
        try:
            exec(code)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
WRITES = {  # what a program does, and the text of `out/old.txt` that it sees afterwards
    "appends": "open('out/old.txt', 'a').write(' more')",
    "writes": "open('out/old.txt', 'w').write('new')",
    "updates": "open('out/old.txt', 'r+').write('New')",
    "by a descriptor": "os.write(os.open('out/old.txt', os.O_WRONLY), b'new')",
    "by pathlib": "Path('out/old.txt').write_text('new')",
    "torch.save": "torch.save({}, 'out/old.txt')",
    "torch.save by name": "torch.save({}, f='out/old.txt')",
    "numpy": "numpy.save('out/old.npy', [1])",
    "replaces": "Path('x').write_text('new'); os.replace('x', 'out/old.txt')",
    "copies": "Path('x').write_text('new'); shutil.copy('x', 'out/old.txt')",
    "removes": "os.remove('out/old.txt')",
    "renames": "os.rename('out/old.txt', 'out/other.txt')",
    "removes the folder": "shutil.rmtree('out')",
    "renames the folder": "os.rename('out', 'before'); open('before/old.txt', 'a').write('x')",
    "makes the folder": "os.makedirs('out', exist_ok=True); open('out/new.txt', 'w').write('x')",
    "a folder in it": "os.makedirs('out/deep/er'); open('out/deep/er/a', 'w').write('x')",
    "goes there": "os.chdir('out'); open('old.txt', 'a').write('x'); open('new', 'w').write('x')",
    "permissions": "os.chmod('out/old.txt', 0o600)",
    "truncates": "os.truncate('out/old.txt', 1)",
    "times": "os.utime('out/old.txt', (1, 1))",
    "a data base": "sqlite3.connect('out/old.db').execute('create table t (x)')",
    "a link": "os.symlink('old.txt', 'out/link'); open('out/link', 'a').write('x')",
}
REFUSED = {
    "an absolute path": "open(users / 'out' / 'old.txt', 'a')",
    "a new file": "open(users / 'new.txt', 'w')",
    "another folder": "open(users.parent / 'beyond.txt', 'w')",
    "torch.save": "torch.save({}, users / 'out' / 'old.txt')",
    "the folder above": "open('../new.txt', 'w')",
    "a file above": "open('../../top.txt', 'a')",
    "removes": "os.remove(users / 'out' / 'old.txt')",
    "makes a folder": "os.mkdir(users / 'other')",
    "from a folder of the user's": "os.chdir(users); open('new.txt', 'w')",
}


SEEN = {
    "old and new": "open('out/old.txt', 'a').write(' and new'); print(open('out/old.txt').read())",
    "above": "print(open('../above.txt').read())",
    "top": "print((Path.cwd().parents[1] / 'top.txt').read_text())",
    "False": "print(Path('../users/output.txt').exists())",
}
FREE = {
    "temporary files": "tempfile.TemporaryFile().write(b'x')",
    "caches": "(Path.home() / '.cache' / 'bigbatch-test').write_text('x')",
}


def make_users(folder):
    (folder / "out").mkdir(parents=True)
    for name in ("top.txt", "out/old.txt", "out/old.npy", "out/old.db"):
        (folder / name).write_bytes(b"" if name.endswith("db") else b"old")


def contents(folder):
    """Everything about files that a program might change, but its own folder and output."""
    return {
        path.relative_to(folder): (
            path.stat().st_mode,
            path.stat().st_mtime,
            path.is_file() and path.read_bytes(),
        )
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] not in ("own", "output.txt")
    }


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each program has printed, and whether the user's files are as before, by its code."""
    folder = tmp_path_factory.mktemp("programs")
    codes = [code for cases in (WRITES, REFUSED, SEEN, FREE) for code in cases.values()]
    places = [folder / str(i) for i in range(len(codes))]
    (home := folder / "home" / ".cache").mkdir(parents=True)
    (folder / "top.txt").write_text("top")
    for place in places:
        make_users(place / "users")
        (place / "above.txt").write_text("above")
    before = [contents(place) for place in places]
    users = [str(place / "users") for place in places]
    (folder / "cases.json").write_text(json.dumps([*zip(users, codes, strict=True)]))
    variables = {"TMPDIR": "/dev/shm", "HOME": str(home.parent)}  # elsewhere than the user's files
    done = run(sys.executable, "-c", CASES, folder / "cases.json", **variables)
    assert (0, "") == (done.returncode, done.stderr)
    results = [(place / "output.txt").read_text() for place in places]
    same = [contents(place) == one for place, one in zip(places, before, strict=True)]
    return dict(zip(codes, zip(results, same, strict=True), strict=True))


@pytest.mark.parametrize("name", WRITES)
def test_the_users_files_stay_as_they_are(outputs, name):
    assert ("", True) == outputs[WRITES[name]]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_in_the_folder_is_refused(outputs, name):
    output, same = outputs[REFUSED[name]]
    assert "PermissionError" in output
    assert "writes to its own working folder alone" in output
    assert same


@pytest.mark.parametrize("text", SEEN)
def test_a_program_sees_its_changes_and_the_folders_above(outputs, text):
    assert (f"{text}\n", True) == outputs[SEEN[text]]


@pytest.mark.parametrize("name", FREE)
def test_temporary_files_and_caches_are_the_programs(outputs, name):
    assert ("", True) == outputs[FREE[name]]


RANKS = """
import os, sys
from pathlib import Path
from bigbatch.advisor.own_folder import OwnFolder

users, root = map(Path, sys.argv[1:])
folder = OwnFolder(root, users)
folder.make()
ready, go = os.pipe()
ranks = []
for rank in range(4):
    if (child := os.fork()) == 0:
        os.close(go)
        os.read(ready, 1)  # all begin at once
        texts = {folder.own(path).read_text() for path in sorted(users.glob("*.py"))}
        folder.enter()
        for number in range(50):
            with open(f"out/{number}.txt", "a") as file:
                file.write(f" {rank}")
        os._exit(texts != {"script"})
    ranks.append(child)
os.close(go)
print([os.waitpid(one, 0)[1] for one in ranks])
"""


def test_ranks_of_one_folder_lose_nothing(tmp_path):
    users = tmp_path / "users"
    (users / "out").mkdir(parents=True)
    for number in range(50):
        (users / f"{number}.py").write_text("script")
        (users / "out" / f"{number}.txt").write_text("old")
    done = run(sys.executable, "-c", RANKS, users, tmp_path / "own")
    assert ("[0, 0, 0, 0]\n", "") == (done.stdout, done.stderr)
    own = tmp_path.joinpath("own", *users.parts[1:][-3:])
    for number in range(50):
        old, *ranks = (own / "out" / f"{number}.txt").read_text().split()
        assert ("old", ["0", "1", "2", "3"]) == (old, sorted(ranks))
        assert "old" == (users / "out" / f"{number}.txt").read_text()
