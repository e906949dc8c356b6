"""The command, killed before its n-th operation on a file of a folder: `dying.py FOLDER N ...`.

With N = 0 it lives, and writes the number of its operations to `FOLDER.operations`.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir"}


def kill_before(folder: str, number: int):
    """Counts from now on; returns the counter."""
    numbers, seen = count(1), [0]

    def count_operation(event, arguments):
        if event in OPERATIONS and any(folder in str(each) for each in arguments):
            seen[0] = next(numbers)
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_operation)
    return seen


if __name__ == "__main__":
    folder, number, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
    from dropout_digits import main, register

    register()
    seen = kill_before(folder, int(number))
    try:
        main()
    finally:
        if number == "0":
            Path(f"{folder}.operations").write_text(str(seen[0]))
