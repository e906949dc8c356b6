"""A script of others and the edit that a user makes in it: a diff whose lines are counted."""

import re
from pathlib import Path

BETWEEN = "..."  # two places of the script

STEPS = """\
+        for step in train:
+            for batch in step:
+                outputs = model(**batch)
+                step.backward(outputs.loss)
+            done = step.update()
+            print("update", done.batch_size, done.samples, done.similarity, done.loss)
"""  # in place of a loop of one's own over batches of Hugging Face's


def edited(script: Path, edit: str, into: Path) -> Path:
    """Writes the script after the edit.

    Args:
        script: a Python file.
        edit: lines that begin with a space, "-" or "+": what stays, goes and comes; places of the
            script are separated by "...".
        into: the folder to write to.
    Raises:
        ValueError: lines that stay or go stand not once in the script.
    """
    text = script.read_text()
    for place in edit.strip("\n").split(f"\n{BETWEEN}\n"):
        lines = place.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        if text.count(before) != 1:
            raise ValueError(f"{script.name} has {text.count(before)} times\n{before}")
        text = text.replace(before, after)
    written = into / script.name
    written.write_text(text)
    return written


def updates_of(output: str) -> list[tuple[int, int, float, float]]:
    """(batch size, samples so far, similarity, loss) of each update that `STEPS` has printed."""
    updates = re.findall(r"update (\d+) (\d+) (\S+) (\S+)", output)
    return [
        (int(size), int(so_far), float(phi), float(loss)) for size, so_far, phi, loss in updates
    ]


def typed(edit: str) -> int:
    """Lines that the user has written."""
    return sum(line.startswith("+") for line in edit.splitlines())
