"""`bigbatch advise` on scripts of others: none is edited, and each trains as without it."""

import argparse
import inspect
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("datasets")

from safetensors.torch import load_file

from advised_script import advise, start
from tiny_language_files import LENGTH, write_language

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 20


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def clm_arguments(folder, out, accumulation):
    write_language(folder)
    given = {
        "--config_name": folder / "model",
        "--tokenizer_name": folder / "model",
        "--train_file": folder / "train.txt",
        "--validation_file": folder / "validation.txt",
        "--max_train_samples": 160,
        "--block_size": LENGTH,
        "--output_dir": folder / out,
        "--per_device_train_batch_size": 8,
        "--gradient_accumulation_steps": accumulation,
        "--learning_rate": 5e-3,
        "--max_steps": 2 * STEPS,
        "--report_to": "none",
        "--save_strategy": "no",
    }
    return [*(f"{name}={value}" for name, value in given.items()), "--do_train", "--use_cpu"]


def lightning_arguments(folder):
    folder.mkdir()
    (folder / "wikitext-2.txt").write_text(inspect.getsource(argparse))
    return [f"--data={folder}", "--max_epochs=1"]


def assert_advised(advised, **found):
    assert "" == advised.page["refusal"]
    without_size = advised.page["batch_size"] is None
    assert without_size == advised.process.returncode, advised.process.stderr
    assert found == {name: advised.page["found"][name] for name in found}
    assert advised.page["measurements"]
    assert all(measurement["grad_variance"] > 0 for measurement in advised.page["measurements"])


def run_twice(script, alone, advised):
    """Runs the script alone, and under the command with arguments that write elsewhere."""
    ended = start(script, *alone)
    assert 0 == ended.returncode, ended.stderr
    under = ["-m", "bigbatch", "advise", "--steps", STEPS, "--go-on"]
    ended = start(*under, script, *advised)
    assert 0 == ended.returncode, ended.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("accumulation", "way"), [(1, "groups"), (4, "micro-batches")])
def test_run_clm_is_measured(tmp_path, accumulation, way, ranks):
    advised = advise(
        tmp_path,
        SCRIPTS / "run_clm.py",
        *clm_arguments(tmp_path, "advised", accumulation),
        options=["--steps", STEPS],
        ranks=ranks,
    )
    sizes = {"micro_batch": 8, "batch_size": 8 * accumulation * ranks}
    assert_advised(advised, accumulation=accumulation, ranks=ranks, way=way, **sizes)
    assert "AdamW" in advised.page["found"]["optimizer"]


def test_run_clm_trains_as_without_the_command(tmp_path):
    arguments = [clm_arguments(tmp_path, out, 1) for out in ("alone", "advised")]
    run_twice(SCRIPTS / "run_clm.py", *arguments)
    alone, advised = (
        load_file(tmp_path / out / "model.safetensors") for out in ("alone", "advised")
    )
    assert same_weights(alone, advised)
    alone, advised = (
        json.loads((tmp_path / out / "train_results.json").read_text())["train_loss"]
        for out in ("alone", "advised")
    )
    assert alone == advised


@pytest.mark.parametrize("ranks", [1, 2])
def test_nlp_example_is_measured(tmp_path, ranks):
    given = ["--cpu", f"--output_file={tmp_path / 'weights'}"]
    options = ["--steps", STEPS]
    advised = advise(tmp_path, SCRIPTS / "nlp_example.py", *given, options=options, ranks=ranks)
    sizes = {"micro_batch": 8, "batch_size": 8 * ranks}
    assert_advised(advised, accumulation=1, ranks=ranks, way="groups", **sizes)


def test_nlp_example_trains_as_without_the_command(tmp_path):
    files = [tmp_path / "alone", tmp_path / "advised"]
    arguments = [["--cpu", f"--output_file={file}"] for file in files]
    run_twice(SCRIPTS / "nlp_example.py", *arguments)
    assert same_weights(*map(torch.load, files))


def test_lightnings_transformer_is_measured(tmp_path):
    """Four samples a batch, and dropout."""
    given = lightning_arguments(tmp_path / "run")
    options = ["--steps", STEPS]
    advised = advise(tmp_path, SCRIPTS / "lightning_transformer.py", *given, options=options)
    assert_advised(advised, accumulation=1, ranks=1, micro_batch=4, batch_size=4)
    assert advised.page["found"]["way"] in ("groups", "consecutive steps")


def test_lightnings_transformer_trains_as_without_the_command(tmp_path):
    """With the same dropout: what is measured draws no random number of the script's."""
    folders = [tmp_path / "alone", tmp_path / "advised"]
    arguments = [lightning_arguments(folder) for folder in folders]
    run_twice(SCRIPTS / "lightning_transformer.py", *arguments)
    assert same_weights(*(torch.load(folder / "weights.pt") for folder in folders))


def test_preferences_are_counted_in_pairs(tmp_path):
    """DPO: the forward has 8 answers for 4 pairs, whose gradients are nearly opposite."""
    pages = [
        advise(
            tmp_path,
            SCRIPTS / "dpo.py",
            f"--per_device_train_batch_size={pairs}",
            "--steps=400",
            options=["-o", tmp_path / "page.txt"],
        ).page
        for pairs in (4, 16)
    ]
    assert [4, 16] == [page["found"]["batch_size"] for page in pages]
    assert ["groups"] * 2 == [page["found"]["way"] for page in pages]
    # of rows that are compared alone it is infinite
    scales = [page["noise_scale"] for page in pages]
    assert all(scale["value"] is not None and scale["value"] < math.inf for scale in scales)
    assert max(scale["low"] for scale in scales) < min(
        scale["high"] or math.inf for scale in scales
    )
    assert all(any("i and i + B / 2" in doubt for doubt in page["doubts"]) for page in pages)


def test_the_lines_of_preferences_are_settings_of_the_loader(tmp_path):
    given = ["--per_device_train_batch_size=16", "--steps=100"]
    page = tmp_path / "page.txt"
    advised = advise(tmp_path, SCRIPTS / "dpo.py", *given, options=["-o", page])
    text, size = page.read_text(), advised.page["batch_size"]
    assert "1 x 1 x 16, as its DataLoader counts them; dimension 0" in text
    assert "Lines to add" not in text or f"DataLoader(..., batch_size={size})" in text
    assert (size is None) == advised.process.returncode


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("loss", ["loop", "two-calls", "model"])
def test_an_in_batch_contrastive_loss_is_refused_by_name(tmp_path, loss, norm):
    advised = advise(tmp_path, SCRIPTS / "simclr.py", f"--loss={loss}", f"--norm={norm}")
    assert 1 == advised.process.returncode
    assert "the samples of a backward influence each other in Mm" in advised.page["refusal"]
    assert advised.page.keys().isdisjoint({"batch_size", "noise_scale", "devices"})
    assert not any(word in advised.process.stdout for word in ("Grow", "Noise scale", "Lines"))
