"""A transformer over characters: what it reads, what it sees, and that it learns."""

import json
import math
from collections import Counter

import pytest
import torch

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.char_lm import CHAR_LM
from bigbatch_recipes.datasets.characters import codes_of, split_codes, windows_of
from bigbatch_recipes.datasets.text import stdlib_text
from bigbatch_recipes.models.char_transformer import CharTransformer
from bigbatch_recipes.train_run import Training
from real_data import FOLDER, needs

TINY = {"length": 16, "width": 16, "depth": 1, "heads": 2, "epochs": 1, "samples": 1_500}
BITS = "bits per character"
SHAKESPEARE = FOLDER / "tinyshakespeare"


def settings_of(**changes):
    return CHAR_LM.settings().with_changes({**TINY, **changes})


def network(**changes):
    torch.manual_seed(0)
    return CharTransformer(128, 16, **{"width": 16, "depth": 2, "heads": 2, **changes}).eval()


def unigram_bits(text):
    """What is known of a character by how often it comes."""
    counts = Counter(text)
    shares = [count / len(text) for count in counts.values()]
    return -sum(share * math.log2(share) for share in shares)


# the model


def test_it_has_so_many_parameters():
    width, depth, length = 384, 6, 256
    layer = 12 * width**2 + 13 * width  # attention, two layers of 4 times the width, two norms
    rest = 2 * 128 * width + 128 + length * width + 2 * width
    model = CHAR_LM.model(CHAR_LM.at_scale(paper=True).settings())
    assert depth * layer + rest == sum(p.numel() for p in model.parameters())


def test_no_character_is_seen_before_it_is_predictions():
    model = network()
    codes = torch.randint(128, (1, 16), generator=torch.Generator().manual_seed(0))
    other = codes.clone()
    other[0, 9] = (codes[0, 9] + 1) % 128
    with torch.no_grad():
        before, after = model(codes), model(other)
    assert torch.equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] - after[0, 9:]).abs().amax(-1).min() > 1e-6


def test_its_layers_begin_with_weights_of_their_own():
    first, second = network().body.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)
    assert pytest.approx(0.02, rel=0.1) == first.linear1.weight.std().item()


def test_training_and_judging_agree_on_a_model_without_dropout():
    model = network()
    codes = torch.arange(30).reshape(2, 15)
    with torch.no_grad():
        judged = model(codes)
        trained = model.train()(codes)
    torch.testing.assert_close(judged, trained, rtol=1e-4, atol=1e-6)


# the text


def test_windows_share_the_character_between_them_and_predict_each_once():
    (windows,) = windows_of(codes_of("abcdefghij"), 3).tensors
    texts = ["".join(map(chr, window)) for window in windows.tolist()]
    assert ["abcd", "defg", "ghij"] == texts


@pytest.mark.parametrize("length", [0, 4, 5])
def test_a_text_without_a_window_is_refused(length):
    with pytest.raises(SettingError, match=f"4 characters has no window of length={length}"):
        windows_of(codes_of("abcd"), length)


def test_the_held_out_text_is_the_end():
    train, test = split_codes(["abcdef", "gh"], 0.9)
    assert ("abcdef\n\ng", "h") == tuple("".join(map(chr, part)) for part in (train, test))


@needs("tinyshakespeare")
def test_shakespeare_has_as_many_characters_as_published():
    data = CHAR_LM.data(
        CHAR_LM.at_scale(paper=True).settings().with_changes({"data": str(SHAKESPEARE)})
    )
    assert CHAR_LM.paper_samples == len(data.train) == (1_115_394 * 9 // 10 - 1) // 256
    (first,) = data.train[0]
    assert "First Citizen:\nBefore we proceed" == "".join(map(chr, first))[:32]


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "input.txt").write_bytes(b"caf\xe9")
    with pytest.raises(RunError, match=r"input\.txt cannot be read .UnicodeDecodeError: "):
        CHAR_LM.data(settings_of(data=str(tmp_path)))


# the score


def test_bits_are_the_mean_over_all_characters_of_what_each_takes_alone(tmp_path):
    text = "".join(chr(97 + (7 * at * at) % 26) for at in range(1_000))
    (tmp_path / "input.txt").write_text(text)
    settings = settings_of(data=str(tmp_path), micro_batch=4)  # the last batch has fewer windows
    model = network(depth=1)
    ((name, found),) = CHAR_LM.data(settings).scores(model).items()
    assert f"{BITS} (Shakespeare)" == name
    held_out, bits = text[900:], []
    with torch.no_grad():
        for start in range(0, 96, 16):
            codes = torch.tensor([list(map(ord, held_out[start : start + 17]))])
            if codes.shape[1] == 17:
                odds = model(codes[:, :-1]).log_softmax(-1)[0]
                bits += [-odds[at, codes[0, at + 1]].item() / math.log(2) for at in range(16)]
    assert 96 == len(bits)
    assert pytest.approx(sum(bits) / len(bits), rel=1e-5) == found


@pytest.mark.thorough
def test_a_model_that_knows_nothing_needs_seven_bits():
    settings = settings_of()
    model = CHAR_LM.model(settings)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    with torch.no_grad():
        (found,) = CHAR_LM.data(settings).scores(model.eval()).values()
    assert pytest.approx(7.0) == found


# trainings


@pytest.mark.thorough
def test_the_command_trains_on_pythons_own_texts_and_says_so(bigbatch, tmp_path):
    place = tmp_path / "run"
    changes = {**TINY, "samples": 4_000, "base_batch": 16, "batch_size": 16, "lr": 0.01}
    options = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    status, _, noted = bigbatch(
        "train", "char-lm", "--arm", "simigrad-vr", *options, "--run-dir", place, "--quiet"
    )
    assert 0 == status, noted
    assert "note: no --data; the documentation inside Python's standard library is used" in noted
    last = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
    assert [f"{BITS} (Python's texts)"] == list(last["metrics"])
    assert unigram_bits("".join(stdlib_text())) - 0.5 > last["metrics"][f"{BITS} (Python's texts)"]


def test_no_text_in_the_folder_is_said(bigbatch, tmp_path):
    status, _, said = bigbatch(
        "train", "char-lm", "--data", tmp_path, "--run-dir", tmp_path / "run"
    )
    assert 2 == status
    assert f"tiny Shakespeare is not in {tmp_path}: input.txt of github.com/karpathy/char" in said
    assert not (tmp_path / "run").exists()


def trained(rank, ranks, settings):
    """Scores, and all weights, after an epoch."""
    training = Training(CHAR_LM, settings)
    for step in training.train:
        for batch in step:
            step.backward(training.loss_of(training.wrapped_model, batch))
        step.update()
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    return training.scores(), weights


def test_two_ranks_learn_what_one_process_learns(ranks, tmp_path):
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question: " * 100)
    settings = settings_of(data=str(tmp_path))
    (scores, weights), (other_scores, other_weights) = ranks(2)(trained, settings)
    assert scores == other_scores
    assert torch.equal(weights, other_weights)
    alone_scores, alone_weights = trained(0, 1, settings)
    torch.testing.assert_close(alone_weights, weights, rtol=1e-3, atol=1e-4)
    assert pytest.approx(alone_scores, rel=1e-4) == scores


@pytest.mark.release
@needs("tinyshakespeare")
def test_half_an_epoch_of_shakespeare_ends_far_below_the_letters_alone(bigbatch, tmp_path):
    place = tmp_path / "run"
    options = ["--set", "epochs=1", "--set", "samples=8000", "--arm", "fixed"]
    status, *said = bigbatch("train", "char-lm", "--data", FOLDER, *options, "--run-dir", place)
    assert 0 == status, said
    last = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
    alone = unigram_bits((SHAKESPEARE / "input.txt").read_text())
    assert alone - 1 > last["metrics"][f"{BITS} (Shakespeare)"]
