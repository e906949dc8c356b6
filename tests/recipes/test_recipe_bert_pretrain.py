"""BERT pre-training: the text, the hidden tokens, the pairs, the network, and that it learns."""

import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy
import pytest
import torch
from torch.nn import functional

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.bert_pretrain import BERT_PRETRAIN
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.datasets.sentence_pairs import IGNORED, Book, Masking, SentencePairs
from bigbatch_recipes.datasets.sequence_pair import SequencePair
from bigbatch_recipes.datasets.text import corpus_of
from bigbatch_recipes.models.hf_bert.bert_heads import Pretraining, SpanFinder
from bigbatch_recipes.models.hf_bert.wordpiece import SPECIAL, WordPieceTokenizer, train_wordpiece
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.study import build_training
from bigbatch_recipes.tasks.masked_tokens import scores_of
from real_data import FOLDER, needs
from recipe_steps import few_steps

TINY = {
    "vocabulary": 500,
    "length": 32,
    "predictions": 5,
    "samples": 64,
    "judged": 8,
    "batch_size": 32,
    "base_batch": 32,
    "micro_batch": 8,
}
FRAME = SequencePair(begin=2, end=3, pad=0, length=32)
MASKING = Masking(mask=4, ordinary=numpy.arange(1_000, 2_000, dtype=numpy.int32), max_predictions=5)


def tree(number):
    """A document with a few words of its own."""
    return f"the tree{number} and the leaf\nof tree{number} are green and old, the end {number}"


TREES = ("oak", "elm", "ash", "fir", "yew", "beech", "maple", "alder")


def wood(number):
    """A document about one of the trees, in always the same words."""
    return 3 * f"the {TREES[number % 8]} and its leaf are green and very old , so is the root\n"


@pytest.fixture
def forest(tmp_path):
    """A folder of text in BERT's layout, 200 short documents."""
    (tmp_path / "text.txt").write_text("\n\n".join(wood(n) for n in range(200)))
    return tmp_path


def settings_of(folder, **changes):
    return BERT_PRETRAIN.settings().with_changes({**TINY, "data": str(folder), **changes})


def options(changes):
    return [text for name, value in changes.items() for text in ("--set", f"{name}={value}")]


# text


def test_documents_have_blank_lines_between_them_and_each_50th_is_held_out(tmp_path):
    text = "\n\n".join(f"first {n}\nlast {n}" for n in range(100)) + "\n\n\n"
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    (tmp_path / "a.txt").write_text("before\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    corpus = corpus_of(tmp_path)
    assert ["first 48\nlast 48", "first 98\nlast 98"] == list(corpus.held_out())
    train = list(corpus.train())
    assert (99, "before", "first 0\nlast 0") == (len(train), *train[:2])


def test_a_text_that_is_there_packed_and_not_is_read_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\n"))  # held out from itself, else
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"c\n"))
    assert ["a", "b", "c"] == list(corpus_of(tmp_path).train())


def test_an_article_of_wikitext_goes_from_title_to_title(tmp_path):
    lines = ["", " = One = ", "", " a <unk> of 1 @,@ 000 ", " = = Part = = ", " b ", " = Two = "]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n c\n")
    expected = ["= One =\na [UNK] of 1,000\n= = Part = =\nb", "= Two =\nc"]
    assert expected == list(corpus_of(tmp_path).train())


@needs("wikitext-2")
def test_wikitext_2_has_its_600_and_60_articles():
    corpus = corpus_of(FOLDER / "wikitext-2")
    train = list(corpus.train())
    assert (600, 60) == (round(len(train), -2), round(len(list(corpus.held_out())), -1))
    assert train[0].startswith("= Valkyria Chronicles III =")
    assert not any("@-@" in article or "<unk>" in article for article in train)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ("train.txt", "valid.txt"),
        ("valid.txt.gz", "train.txt.gz"),
        ("wiki.train.tokens", "wiki.valid.tokens"),
    ],
)
def test_wikitext_without_one_of_its_files_is_no_other_text(tmp_path, present, missing):
    for name in (present, "test.txt"):
        (tmp_path / name).touch()
    with pytest.raises(
        RunError, match=f"{present} is WikiText's by its name, and {missing} is not"
    ):
        corpus_of(tmp_path)


def test_a_folder_without_text_and_a_damaged_file_are_named(tmp_path):
    with pytest.raises(RunError, match=r"no \*.txt or \*.txt.gz or .* in"):
        corpus_of(tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(RunError, match=r"a.txt.gz cannot be read .*; fetch it again, whole"):
        list(corpus_of(tmp_path).train())


# tokens


def test_the_vocabulary_trained_on_a_text_is_the_same_each_time():
    texts = [tree(n) + f" word{n % 7}s" for n in range(100)]
    first, again = (train_wordpiece(lambda: texts, 150).vocabulary for _ in range(2))
    assert first == again
    assert SPECIAL == first[:5]
    assert {"the", "tree", "##1"} <= set(first)
    with pytest.raises(SettingError, match="vocabulary=20 is too small for the"):
        train_wordpiece(lambda: texts, 20)


@needs("bert-vocab")
def test_googles_vocabulary_cuts_words_as_it_always_has():
    lines = (FOLDER / "bert-vocab" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    tokenizer = WordPieceTokenizer(lines)
    (numbers,) = tokenizer.encode(["Unaffable [MASK]?"])
    expected = ["una", "##ffa", "##ble", "[MASK]", "?"]
    assert (30_522, expected) == (len(tokenizer.vocabulary), [lines[number] for number in numbers])
    ((_, places),) = tokenizer.encode_with_offsets(["ab  Caf\u00e9!"])
    assert [[0, 2], [4, 8], [8, 9]] == places.tolist()


def test_a_vocabulary_without_mask_is_refused():
    with pytest.raises(SettingError, match=r"of 5 tokens lacks \[MASK\]; a vocab.txt has one"):
        WordPieceTokenizer([*SPECIAL[:4], "a"])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(3, 2, (3, 2)), (50, 4, (25, 4)), (4, 50, (4, 25)), (50, 50, (15, 14))],
)
def test_a_pair_is_cut_at_the_longer_ones_end(first, second, expected):
    row = FRAME.encode([7] * first, [9] * second)[0]
    assert expected == ((row == 7).sum(), (row == 9).sum())


# what is hidden


def test_of_the_chosen_tokens_80_in_100_are_masked_and_10_are_random():
    tokens = numpy.full(40, 9, dtype=numpy.int32)
    may = numpy.arange(40) >= 7
    draw, kinds = numpy.random.default_rng(0), Counter()
    for _ in range(2_000):
        hidden, places, labels = MASKING.mask_tokens(tokens, may, draw)
        assert (5, 5) == (len(set(places)), (labels == 9).sum())  # 15 % of 33
        assert may[places].all()
        untouched = numpy.ones(40, dtype=bool)
        untouched[places] = False
        assert (hidden[untouched] == 9).all()
        kinds.update(
            "mask" if one == 4 else "same" if one == 9 else "random" for one in hidden[places]
        )
    shares = {kind: count / 10_000 for kind, count in kinds.items()}
    assert pytest.approx({"mask": 0.8, "random": 0.1, "same": 0.1}, abs=0.01) == shares


def test_a_short_row_has_fewer_places_and_one_without_words_none():
    tokens = numpy.full(10, 9, dtype=numpy.int32)
    draw = numpy.random.default_rng(0)
    _, _, labels = MASKING.mask_tokens(tokens, numpy.ones(10, dtype=bool), draw)
    assert [9, 9] + [IGNORED] * 3 == labels.tolist()  # 15 % of 10
    _, _, labels = MASKING.mask_tokens(tokens, numpy.zeros(10, dtype=bool), draw)
    assert [IGNORED] * 5 == labels.tolist()


# pairs


def counted(draws=1, seed=0):
    """Ten documents of 100 tokens, that tell where they stand: 1000 + 100 document + place."""
    documents = [
        numpy.arange(1_000 + 100 * n, 1_100 + 100 * n, dtype=numpy.int32) for n in range(10)
    ]
    return SentencePairs(Book.of(documents, "ten"), FRAME, MASKING, [0, 2, 3, 4], draws, seed)


def original(row):
    """The tokens of both segments before some were hidden."""
    tokens, segments, real, places, labels, _ = row
    shown = labels != IGNORED
    tokens = tokens.index_put((places[shown].long(),), labels[shown])
    return [tokens[(segments == one) & real & (tokens > 4)] for one in (0, 1)]


def test_half_of_the_pairs_follow_and_the_others_are_of_another_document():
    pairs = counted(draws=20)
    assert 20 * 10 * 3 == len(pairs)  # of 29 tokens; the 13 left over are too few for a row
    follows = 0
    for index in range(len(pairs)):
        first, second = original(pairs[index])
        random = bool(pairs[index][-1])
        follows += not random
        assert random == bool(second[0] // 100 != first[0] // 100)
        assert random or second[0] == first[-1] + 1
        assert (second.diff() == 1).all()
        assert (first.diff() == 1).all()
    assert pytest.approx(0.5, abs=0.06) == follows / len(pairs)


def test_a_row_is_drawn_by_seed_and_number_alone():
    pairs, again, other = counted(), counted(), counted(seed=1)
    batch = pairs.__getitems__([7, 3])
    for column, alone, later in zip(batch, pairs[3], again.__getitems__([3]), strict=True):
        assert torch.equal(column[1], alone)
        assert torch.equal(column[1], later[0])
    assert not torch.equal(pairs[3][0], other[3][0])
    twice = counted(draws=2)
    assert not torch.equal(twice[3][0], twice[3 + len(pairs)][0])


def test_one_document_is_no_book():
    long_and_short = [numpy.arange(size, dtype=numpy.int32) for size in (20, 3)]
    with pytest.raises(RunError, match="poems: it has 1 documents of 16 tokens or more"):
        Book.of(long_and_short, "poems")


def test_of_too_few_documents_the_part_is_named_and_how_many_it_takes(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(wood(n) for n in range(60)))
    wanted = r"held out \(each 50th document, so that two take 100\): it has 1 documents"
    with pytest.raises(RunError, match=wanted):
        BERT_PRETRAIN.data(settings_of(tmp_path))


# network and loss


@pytest.mark.parametrize(
    ("network", "size", "vocabulary", "expected"),
    [  # BERT-base and -large as published: 110M and 340M with the heads of pre-training
        (Pretraining, "base", 30_522, 110_106_428),
        (Pretraining, "large", 30_522, 336_226_108),
        (SpanFinder, "base", 30_522, 108_893_186),
    ],
)
def test_networks_have_the_published_number_of_parameters(network, size, vocabulary, expected):
    with torch.device("meta"):
        model = network(size, vocabulary)
    assert expected == sum(parameter.numel() for parameter in model.parameters())


def test_padding_changes_nothing():
    torch.manual_seed(0)
    model = SpanFinder("tiny", 50).eval()
    tokens = torch.randint(50, (2, 9))
    real, segments = torch.ones(2, 9, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.int32)
    expected = model(tokens, segments, real)[0]
    padded = [functional.pad(column, (0, 5), value=column[0, 0]) for column in (tokens, segments)]
    actual = model(*padded, functional.pad(real, (0, 5)))[0][:, :9]
    torch.testing.assert_close(expected, actual)


def test_an_unknown_size_is_refused():
    with pytest.raises(SettingError, match="size 'huge' is unknown; choose one of: tiny, mini"):
        Pretraining("huge", 50)


def test_the_loss_is_the_mean_over_rows_of_hidden_tokens_and_of_the_pair(forest):
    settings = settings_of(forest)
    torch.manual_seed(0)
    model, loss_of = BERT_PRETRAIN.model(settings), BERT_PRETRAIN.loss(settings)
    batch = BERT_PRETRAIN.data(settings).train.__getitems__([0, 1, 2])
    each = []
    for row in zip(*batch, strict=True):
        *rows, places, labels, random = (column[None] for column in row)
        tokens, pair = model(*rows, places)
        shown = labels[0] != IGNORED
        predicted = functional.cross_entropy(tokens[0, shown], labels[0, shown].long())
        each.append(predicted + functional.cross_entropy(pair, random))
    torch.testing.assert_close(torch.stack(each).mean(), loss_of(model, batch))


def test_the_arms_of_both_scales_have_the_same_names_and_phases():
    assert BERT_PRETRAIN.arms.keys() <= BERT_PRETRAIN.paper_arms.keys()
    for name in BERT_PRETRAIN.arms:
        small, paper_scale = (
            recipe.arm(name, recipe.settings())
            for recipe in (BERT_PRETRAIN, BERT_PRETRAIN.at_scale(paper=True))
        )
        assert (small.init_from, small.optimizer) == (paper_scale.init_from, paper_scale.optimizer)
        assert {"short": 128, "long": 512}[name.rpartition("-")[2]] == paper_scale.task["length"]


@pytest.mark.parametrize("paper_scale", [False, True])
def test_the_example_goes_through_loss_and_model_without_data(paper_scale):
    settings = BERT_PRETRAIN.at_scale(paper=paper_scale).settings()
    with torch.device("meta"):
        model = BERT_PRETRAIN.model(settings)
    batch = BERT_PRETRAIN.example(settings, 3)
    assert "meta" == BERT_PRETRAIN.loss(settings)(model, batch).device.type


# trainings


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_two_phases_train_and_hand_on_weights_and_vocabulary(bigbatch, forest):
    short, long = forest / "short", forest / "long"
    train = ["train", "bert-pretrain", "--data", forest, "--quiet", *options(TINY)]
    assert 0 == bigbatch(*train, "--arm", "simigrad-short", "--run-dir", short)[0]
    tuned = ["--policy", "fixed", "--set", "samples=32"]
    status, _, said = bigbatch(*train, *tuned, "--init-from", short, "--run-dir", long)
    assert (0, "") == (status, said)  # all weights fit
    assert (short / "vocab.txt").read_text() == (long / "vocab.txt").read_text()
    (name, *_), scores = zip(*rows_of(long)[-1]["metrics"].items(), strict=True)
    assert f"masked tokens right, % (held out of {forest.name})" == name
    assert all(score >= 0 for score in scores)


@pytest.mark.thorough
def test_a_run_that_continues_keeps_its_vocabulary_whatever_became_of_the_text(bigbatch, forest):
    run = forest / "run"
    train = ["train", "bert-pretrain", "--data", forest, "--quiet", *options(TINY)]
    assert 0 == bigbatch(*train, "--arm", "simigrad-short", "--run-dir", run)[0]
    vocabulary = (run / "vocab.txt").read_text()
    (forest / "more.txt").write_text("\n\n".join(tree(n) for n in range(100)))
    settings = Settings.from_dict(RunDirectory.open(run).settings)
    assert vocabulary == build_training(run, settings).data.run_files["vocab.txt"]
    assert vocabulary != build_training(forest / "other", settings).data.run_files["vocab.txt"]


def test_scores_are_shares_of_hidden_tokens_and_of_pairs():
    places = torch.tensor([[1, 2], [3, 0]])
    labels = torch.tensor([[4, 6], [6, IGNORED]], dtype=torch.int32)
    random = torch.tensor([0, 1])
    held_out = InMemoryDataset(places, places, places, places, labels, random)

    def predicting_4_and_random(tokens, segments, real, places):
        of_tokens = torch.zeros(*places.shape, 8)
        of_tokens[..., 4] = 2.0
        return of_tokens, torch.tensor([0.0, 1.0]).expand(len(places), 2)

    total = math.exp(2) + 7
    assert {
        "masked tokens right, % here": pytest.approx(100 / 3),
        "loss of masked tokens here": pytest.approx((3 * math.log(total) - 2) / 3),
        "next sentences right, % here": 50,
    } == scores_of(predicting_4_and_random, held_out, BERT_PRETRAIN.settings(), "here")


@pytest.mark.release
def test_it_learns_the_words_of_a_small_forest(bigbatch, forest):
    changes = {**TINY, "samples": 0, "draws": 6, "batch_size": 16, "base_batch": 16, "lr": 0.02}
    train = ["train", "bert-pretrain", "--data", forest, "--quiet", "--policy", "fixed"]
    assert 0 == bigbatch(*train, *options(changes), "--run-dir", forest / "run")[0]
    right, *_ = rows_of(forest / "run")[-1]["metrics"].values()
    assert right > 40  # the most frequent word is one in eight


def test_a_vocabulary_larger_than_the_network_is_refused(bigbatch, forest):
    (forest / "vocab.txt").write_text("\n".join([*SPECIAL, *map(str, range(600))]))
    status, _, said = bigbatch(
        "train", "bert-pretrain", "--data", forest, *options(TINY), "--seed", 1
    )
    assert 2 == status
    assert "has 605 tokens and the network room for vocabulary=500; set vocabulary=605" in said
    named = ["--set", f"vocab={forest / 'none.txt'}", "--seed", 1]
    status, _, said = bigbatch("train", "bert-pretrain", "--data", forest, *options(TINY), *named)
    assert 2 == status
    assert "there is no vocabulary" in said


def test_a_length_that_bert_has_not_is_refused(forest):
    with pytest.raises(SettingError, match="length=513 must be from 16 to 512 tokens"):
        BERT_PRETRAIN.data(settings_of(forest, length=513))


def test_two_ranks_agree_on_weights_and_scores(ranks, forest):
    settings = settings_of(forest, policy="fixed", virtual_ranks=2)
    (weights, scores), (others, same) = ranks(2)(few_steps, settings)
    assert (weights, scores) == (others, same)
    alone, alone_scores = few_steps(0, 1, settings)
    assert pytest.approx(alone, rel=1e-3, abs=1e-3) == weights  # float32 sums in another order
    assert alone_scores.keys() == scores.keys()


@pytest.mark.release
@needs("wikitext-2")
def test_it_learns_more_than_the_most_frequent_token(bigbatch, tmp_path):
    train = partial(bigbatch, "train", "bert-pretrain", "--quiet", "--run-dir", tmp_path / "run")
    assert 0 == train("--data", FOLDER, "--arm", "simigrad-short", "--set", "samples=12000")[0]
    accuracy, *_ = rows_of(tmp_path / "run")[-1]["metrics"].values()
    settings = BERT_PRETRAIN.settings().with_changes({"data": str(FOLDER / "wikitext-2")})
    data = BERT_PRETRAIN.data(settings).train
    labels = torch.cat([data[index][4] for index in range(0, len(data), 20)])
    most_frequent = labels[labels != IGNORED].bincount().max() / (labels != IGNORED).sum()
    assert accuracy > 130 * float(most_frequent)


@pytest.mark.release
def test_torchrun_on_two_ranks_leaves_one_run_with_its_vocabulary(tmp_path, forest):
    place = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = ["-m", "bigbatch", "train", "bert-pretrain", "--data", forest, "--arm"]
    done = subprocess.run(
        [*launcher, *command, "simigrad-short", *options(TINY), "--run-dir", place],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert 0 == done.returncode, done.stderr
    assert {"vocab.txt", "checkpoint.pt", "metrics.jsonl"} <= {p.name for p in place.iterdir()}
    assert 64 == rows_of(place)[-1]["samples"]
