"""SQuAD: its files, windows, spans and official measure, and that a training answers questions."""

import gzip
import json

import numpy
import pytest
import torch
from torchmetrics.text import SQuAD as Oracle

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.sequence_pair import SequencePair
from bigbatch_recipes.datasets.squad_questions import (
    Question,
    best_spans,
    dev_file,
    exact_match,
    f1,
    most_context,
    read_questions,
    train_file,
    windows_of,
)
from bigbatch_recipes.models.hf_bert.wordpiece import SPECIAL, WordPieceTokenizer
from bigbatch_recipes.squad import SQUAD
from bigbatch_recipes.tasks.answer_spans import scores_of
from real_data import FOLDER, needs
from recipe_steps import few_steps

WORDS = [f"w{n}" for n in range(40)]
TOKENS = WordPieceTokenizer([*SPECIAL, "who", *WORDS, "?"])
TINY = {"vocabulary": 500, "length": 48, "stride": 16, "samples": 64, "judged": 20}


def question(text, context, answer):
    return {
        "question": text,
        "id": text,
        "answers": [{"text": answer, "answer_start": context.index(answer)}],
    }


def written(folder, name, questions, packed=False):
    """A file of the official format with one paragraph a question."""
    paragraphs = [
        {"context": context, "qas": [question(text, context, answer)]}
        for text, context, answer in questions
    ]
    text = json.dumps({"version": "1.1", "data": [{"title": "a", "paragraphs": paragraphs}]})
    if packed:
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / name).write_text(text)


@pytest.fixture
def quiz(tmp_path):
    """The word after "is" is always the answer: something that a tiny network learns."""
    asked = [("who is it?", f"one two {a} is {b} three four", b) for a in WORDS for b in WORDS[:4]]
    written(tmp_path, "train-v1.1.json", asked)
    written(tmp_path, "dev-v1.1.json", asked[::7], packed=True)
    return tmp_path


def windowed(questions, length=12, stride=4):
    frame = SequencePair(TOKENS.begin, TOKENS.end, TOKENS.pad, length)
    return windows_of(questions, TOKENS, frame, stride)


def test_files_are_read_packed_or_not(quiz):
    file, said = train_file(quiz)
    assert ("train-v1.1.json", "", 160) == (file.name, said, len(read_questions(file)))
    first = read_questions(dev_file(quiz))[0]
    assert Question("who is it?", "one two w0 is w0 three four", ("w0",), 8) == first


def test_the_part_of_the_training_questions_is_named(tmp_path):
    written(tmp_path, "train-subset-tokenized.json", [("who", "w1", "w1")])
    assert "; trained on a tokenised 5 % of the questions" == train_file(tmp_path)[1]


@pytest.mark.parametrize("text", ["{", '{"data": [{"paragraphs": [{}]}]}', '{"data": 1}'])
def test_a_file_of_another_format_is_one_clear_error(tmp_path, text):
    (tmp_path / "dev-v1.1.json").write_text(text)
    with pytest.raises(RunError, match=r"dev-v1.1.json is no SQuAD 1.1 JSON .*; fetch it again"):
        read_questions(dev_file(tmp_path))


def test_missing_files_are_named(bigbatch, tmp_path):
    with pytest.raises(RunError, match=r"train-v1.1.json is missing; .*SQuAD-explorer"):
        train_file(tmp_path)
    status, _, said = bigbatch("train", "squad", "--data", tmp_path)
    assert 2 == status
    both = "dev-v1.1.json or dev-v1.1.json.gz, and train-v1.1.json or train-v1.1.json.gz"
    assert f"{both} of rajpurkar.github.io/SQuAD-explorer" in said


@needs("squad-v1.1")
def test_the_real_files_have_their_counts():
    train, dev = (
        read_questions(find)
        for find in (train_file(FOLDER / "squad-v1.1")[0], dev_file(FOLDER / "squad-v1.1"))
    )
    assert (4_253, 10_570) == (len(train), len(dev))
    assert 2_067 == len({one.context for one in dev})
    for one in train + dev:
        assert one.answers[0] == one.context[one.begin : one.begin + len(one.answers[0])]


GOLDEN = [
    ("The Cat!", ["cat", "a dog"]),
    ("the cat sat", ["A cat sat down", "dog"]),
    ("", ["the"]),
    ("nothing", ["something else"]),
    ("a b b c", ["b c c", "a b"]),
    ("well-known U.S. city", ["U.S. City", "well known city"]),
    ("caf\u00e9  42", ["Caf\u00e9 42.", "42"]),
]


@pytest.mark.parametrize(("answer", "golden"), [one for one in GOLDEN if one[0]])
def test_the_measure_is_the_official_one(answer, golden):
    answers = {"answer_start": [0] * len(golden), "text": golden}
    wanted = Oracle()([{"prediction_text": answer, "id": "1"}], [{"answers": answers, "id": "1"}])
    assert pytest.approx(wanted["f1"].item()) == 100 * f1(answer, golden)
    assert wanted["exact_match"].item() == 100 * exact_match(answer, golden)


def test_windows_overlap_and_cover_the_paragraph():
    context = " ".join(WORDS[:20])
    windows = windowed([Question("who", context, ("w9 w10",), context.index("w9 w10"))])
    tokens, _, _, first, last = windows.rows.tensors
    starts = [TOKENS.vocabulary[row[3]] for row in tokens]  # [CLS] who [SEP], then 8 tokens
    assert ["w0", "w4", "w8", "w12"] == starts
    assert [0, 3 + 5, 3 + 1, 0] == first.tolist()
    assert [0, 3 + 6, 3 + 2, 0] == last.tolist()
    found = windows.offsets[1, 8, 0], windows.offsets[1, 9, 1]
    assert "w9 w10" == context[slice(*found)]
    assert [0, 0, 0, 0] == windows.question.tolist()
    assert (windows.offsets[:, :3] == -1).all()


def test_a_window_without_room_or_stride_is_refused():
    asked = [Question(" ".join(WORDS[:9]), "w1", ("w1",), 0)]
    assert 1 == len(windowed(asked, length=13).question)  # one token of the paragraph
    with pytest.raises(SettingError, match=r"length=12 has no room .* of 9 tokens; set length=68"):
        windowed(asked, length=12)
    with pytest.raises(SettingError, match="stride"):
        windowed(asked, length=20, stride=0)


def test_the_likeliest_span_is_that_of_trying_all():
    draw = torch.Generator().manual_seed(0)
    first, last = torch.randn(2, 5, 40, generator=draw)
    inside = torch.arange(40).expand(5, -1) >= torch.tensor([[0], [3], [10], [20], [38]])
    begins = inside & (torch.arange(40) % 3 != 0)
    for row, (logit, begin, end) in enumerate(best_spans(first, last, begins, inside).tolist()):
        expected = max(
            (float(first[row, a] + last[row, b]), a, b)
            for a in range(40)
            for b in range(a, min(a + 30, 40))
            if begins[row, a]
        )
        assert pytest.approx(expected) == (logit, begin, end)


def test_answers_of_a_model_that_knows_score_100(quiz):
    settings = SQUAD.settings().with_changes({**TINY, "data": str(quiz)})
    data = SQUAD.data(settings)

    class Knowing(torch.nn.Module):
        """Points to the token after "is"."""

        def forward(self, tokens, segments, real):
            vocabulary = data.run_files["vocab.txt"].splitlines()
            after = (tokens == vocabulary.index("is")) & (segments == 1)
            first = after.roll(1, 1).float()
            letters = torch.tensor([token.startswith("##") for token in vocabulary])
            last = (after.roll(2, 1) & letters[tokens.long()]).float()
            return first, torch.where(last.any(1)[:, None], last, first)

    assert {
        "F1, % (20 dev questions)": 100,
        "exact match, % (20 dev questions)": 100,
    } == data.scores(Knowing())


def test_the_answer_is_that_of_the_window_with_the_likeliest_span():
    context = " ".join(WORDS[:20])
    asked = [Question("who", context, ("w9",), context.index("w9"))]

    def sure_of_w9(tokens, segments, real):
        """In the window before the ones with w9 it would be w1, in the last one anything."""
        w9, w1 = map(TOKENS.vocabulary.index, ("w9", "w1"))
        logits = 5.0 * (tokens == w9) + 3.0 * (tokens == w1)
        return logits, logits

    found = scores_of(sure_of_w9, windowed(asked), asked, SQUAD.settings(), "here")
    assert {"F1, % here": 100, "exact match, % here": 100} == found


def test_a_token_has_most_context_in_one_window_the_first_of_equal_ones():
    windows = windowed([Question("who", " ".join(WORDS[:20]), ("w0",), 0)])
    owned = [numpy.flatnonzero(row) - 3 for row in windows.may_begin]  # 3 tokens before the window
    owned_places = [(begin + row).tolist() for begin, row in zip((0, 4, 8, 12), owned, strict=True)]
    assert [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9],
        [10, 11, 12, 13],
        [14, 15, 16, 17, 18, 19],
    ] == owned_places
    # of (0, 4) and (2, 5): token 2 has 1 of 4 and 0 of 3, token 3 has 0 of 4 and 1 of 3
    uneven = [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert uneven == most_context([(0, 4), (2, 5)]).astype(int).tolist()
    # of (0, 4) and (3, 6): token 3 has 0 of both, and the longer window counts for more
    assert [1, 0] == most_context([(0, 4), (3, 6)])[:, 3].astype(int).tolist()
    assert [0, 1] == most_context([(0, 4), (3, 8)])[:, 3].astype(int).tolist()


@pytest.mark.parametrize("golden", ["w3", "w9 w10"])
def test_an_answer_begins_where_its_window_has_most_context_and_ends_anywhere(golden):
    context = " ".join(WORDS[:20])
    asked = [Question("who", context, (golden,), context.index(golden))]
    begin, *_, end = (TOKENS.vocabulary.index(word) for word in 2 * golden.split())
    w9 = TOKENS.vocabulary.index("w9")

    def sure(tokens, segments, real):
        """Of the answer; and most of w9 where it is the second token of a window."""
        first, last = 5.0 * (tokens == begin), 5.0 * (tokens == end)
        second = 9.0 * (tokens == w9) * (torch.arange(12) == 4)
        return first + second, last + second

    found = scores_of(sure, windowed(asked), asked, SQUAD.settings(), "here")
    assert {"F1, % here": 100, "exact match, % here": 100} == found


def test_the_loss_is_the_mean_of_both_ends():
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    first, last = torch.tensor([1, 2, 3]), torch.tensor([4, 2, 5])
    rows = torch.arange(3)
    shares = logits.softmax(-1)
    expected = -(shares[0, rows, first].log().mean() + shares[1, rows, last].log().mean()) / 2
    batch = (None, None, None, first, last)
    found = SQUAD.loss(SQUAD.settings())(lambda *_: logits.unbind(0), batch)
    assert pytest.approx(expected.item()) == found.item()


def test_a_model_that_diverged_answers_nothing_and_continues(quiz):
    data = SQUAD.data(SQUAD.settings().with_changes({**TINY, "data": str(quiz)}))

    def diverged(tokens, segments, real):
        return torch.full((2, *tokens.shape), float("nan"))

    assert [0, 0] == list(data.scores(diverged).values())


def test_the_example_is_like_a_batch(quiz):
    settings = SQUAD.settings().with_changes({**TINY, "data": str(quiz)})
    batch = SQUAD.data(settings).train.__getitems__([0, 1, 2])
    example = SQUAD.example(settings, 3)
    assert [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in example]


@pytest.mark.thorough
def test_a_training_learns_the_quiz(bigbatch, quiz):
    changes = {**TINY, "samples": 0, "epochs": 8, "micro_batch": 24}
    options = [text for name, value in changes.items() for text in ("--set", f"{name}={value}")]
    run = quiz / "run"
    command = ["train", "squad", "--data", quiz, "--arm", "adam", "--quiet", "--run-dir", run]
    assert 0 == bigbatch(*command, *options)[0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["metrics"]["F1, % (20 dev questions)"] > 60  # one word of eight is 1 in 8
    assert (run / "vocab.txt").read_text().startswith("[PAD]\n[UNK]\n")


def test_two_ranks_agree_on_weights_and_scores(ranks, quiz):
    settings = SQUAD.settings().with_changes({**TINY, "data": str(quiz), "virtual_ranks": 2})
    (weights, scores), (others, same) = ranks(2)(few_steps, settings)
    assert (weights, scores) == (others, same)
    assert numpy.isfinite(weights).all()
