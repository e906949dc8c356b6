"""The Trainer with a batch size that follows a policy, in one process."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerState,
    get_linear_schedule_with_warmup,
)

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.integrations.transformers import AdaptiveMixin, AdaptiveTrainer
from bigbatch.optim import VRAdam
from stateful_policy import Patient
from tiny_trainer import LENGTH, WORDS, Gradients, arguments, gpt, logged, records_of_loop, texts

GROWING = bb.Schedule("8, 16 from 48 samples, 24 from 80 samples")


class Falling:
    """Ever smaller batches."""

    needs = bb.Needs(batch_size=32, min_batch=1)

    def decide(self, noise, now):
        return bb.Decision(16 if now.samples < 64 else 8, "falling")


def adaptive(folder, policy, model=None, data=None, kind=AdaptiveTrainer, **settings):
    ours = {
        name: settings.pop(name)
        for name in (
            "batch_size",
            "base_batch",
            "micro_batch",
            "optimizers",
            "callbacks",
            "eval_dataset",
            "compute_loss_func",
            "every",
            "transport",
        )
        if name in settings
    }
    ours.setdefault("every", 1)
    return kind(
        model=model or gpt(),
        args=arguments(folder, **settings),
        train_dataset=texts() if data is None else data,
        policy=policy,
        **ours,
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def assert_equal(expected, actual, **tolerance):
    torch.testing.assert_close(expected, actual, **tolerance)


# as the plain Trainer


FIGURES = ("loss", "grad_norm", "learning_rate", "epoch", "step")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32, whose sums come in another order


def thorough(settings):
    return pytest.param(settings, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        thorough({"max_grad_norm": 0.0}),
        {"bf16": True},
        {"lr_scheduler_type": "cosine", "warmup_steps": 3},
        thorough({"max_steps": 11}),
        thorough({"num_train_epochs": 1.5}),
        thorough({"label_smoothing_factor": 0.1}),
        thorough({"train_sampling_strategy": "group_by_length"}),
    ],
    ids=lambda settings: next(iter(settings), "default"),
)
def test_a_fixed_batch_trains_as_the_plain_trainer(tmp_path, settings):
    plain = Trainer(
        model=gpt(dropout=0.1),
        args=arguments(
            tmp_path, **settings, per_device_train_batch_size=2, gradient_accumulation_steps=4
        ),
        train_dataset=texts(),
    )
    expected = plain.train()
    trainer = adaptive(
        tmp_path, bb.Fixed(8), gpt(dropout=0.1), **settings, per_device_train_batch_size=2
    )
    actual = trainer.train()

    lines = logged(plain, *FIGURES)
    loose = 1e-2 if "bf16" in settings else 2e-4  # Adam divides by small numbers at its start
    for local, yours in zip(lines, logged(trainer, *FIGURES), strict=True):
        assert local == pytest.approx(yours, rel=loose)
    assert expected.training_loss == pytest.approx(actual.training_loss, rel=loose)
    assert plain.state.global_step == trainer.state.global_step == trainer.state.max_steps
    assert plain.state.total_flos == trainer.state.total_flos
    if "bf16" not in settings:
        assert_equal(weights(plain), weights(trainer), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_input_tokens_are_counted_as_by_the_plain_trainer(tmp_path, counted):
    settings = {"include_num_input_tokens_seen": counted, "max_steps": 3}
    plain = Trainer(
        model=gpt(),
        args=arguments(tmp_path, **settings, gradient_accumulation_steps=2),
        train_dataset=texts(),
    )
    plain.train()
    trainer = adaptive(tmp_path, bb.Fixed(8), **settings)
    trainer.train()
    assert plain.state.num_input_tokens_seen == trainer.state.num_input_tokens_seen > 0


# the batch changes


@pytest.mark.parametrize(
    ("policy", "base_batch"),
    [(GROWING, None), (Falling(), None), (GROWING, 32)],
    ids=["growing", "shrinking", "with-a-base"],
)
def test_every_sample_is_trained_on_and_the_rate_ends_at_nothing(tmp_path, policy, base_batch):
    trainer = adaptive(tmp_path, policy, base_batch=base_batch)
    rates = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler, **others):
            rates.append(lr_scheduler.get_last_lr()[0])

    trainer.add_callback(Rates())
    trainer.train()
    assert 128 == trainer.adaptive.samples
    assert 2.0 == trainer.state.epoch
    assert 0.0 == rates[-1]
    assert trainer.state.global_step == trainer.state.max_steps == len(rates)
    assert 3 <= len({size for (size,) in logged(trainer, "batch_size")})


def test_the_schedule_counts_base_batches(tmp_path):
    trainer = adaptive(tmp_path, bb.Fixed(16), base_batch=4)
    trainer.train()
    rates = [rate for (rate,) in logged(trainer, "learning_rate")]
    expected = [2 * 0.01 * (1 - 4 * step / 32) for step in range(8)]  # 32 base batches; sqrt(16/4)
    assert expected == pytest.approx(rates)


def test_seesaw_follows_the_schedule_of_the_trainer(tmp_path):
    trainer = adaptive(tmp_path, bb.Seesaw(max_batch=32), batch_size=8, num_train_epochs=3)
    trainer.train()
    rows = logged(trainer, "batch_size", "learning_rate")
    assert 20 <= max(batch for batch, _ in rows)
    for batch, rate in rows[:7] + rows[8:11]:  # the others come near the end of an epoch
        scheduled = rate / (batch / 8) ** 0.5
        assert abs(batch - 8 * 1e-2 / scheduled) <= 2.5  # cut into at least 4 micro-batches


def test_transported_betas_are_in_force_in_the_optimizers_step_alone(tmp_path):
    model, seen = gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def values():
        (group,) = optimizer.param_groups
        return group["betas"], group["weight_decay"]

    optimizer.register_step_pre_hook(lambda *_: seen.append(values()))
    settings = {"model": model, "optimizers": (optimizer, None), "transport": True}
    adaptive(tmp_path, bb.Fixed(16), base_batch=4, **settings).train()
    assert {((0.9**4, 0.999**4), 0.1 * 4 / 2)} == set(seen)
    assert ((0.9, 0.999), 0.1) == values()


def test_a_log_has_the_last_measurement_since_the_log_before(tmp_path):
    policy = bb.Fixed(4)
    trainer = adaptive(tmp_path, policy, every=3, num_train_epochs=1, logging_steps=2)
    trainer.train()
    has_similarity = [value is not None for (value,) in logged(trainer, "similarity")]
    # steps 1, 4, 7, 10, 13 and 16 are measured, and each second one is logged
    assert [True, True, False, True, True, False, True, True] == has_similarity
    assert 16 == trainer.adaptive.last_measured.step


@pytest.mark.parametrize("policy", [GROWING, bb.SimiGrad(target=0.5, max_batch=32)])
def test_the_batches_are_those_of_a_loop_by_hand(tmp_path, policy):
    trainer = adaptive(
        tmp_path, policy, batch_size=8, train_sampling_strategy="sequential", weight_decay=0.1
    )
    trainer.train()

    model = gpt()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    loader = torch.utils.data.DataLoader(texts(), 4)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=policy, batch_size=8, every=1)
    train.scheduler = get_linear_schedule_with_warmup(optimizer, 0, train.base_steps(2))
    records = records_of_loop(train, model)

    actual = logged(trainer, "batch_size", "samples", "learning_rate", "similarity", "loss")
    for record, line in zip(records, actual, strict=True):
        expected = (record.lr[0], record.similarity, record.loss)
        assert (record.batch_size, record.samples) == line[:2]
        assert expected == pytest.approx(line[2:], rel=1e-4)
    assert 2 < len({record.batch_size for record in records})


@pytest.mark.parametrize("micro_batch", [1, 3, 6, 8])
def test_every_label_weighs_the_same_however_the_batch_is_cut(tmp_path, micro_batch):
    data = texts(24)
    model = gpt(exact=True)
    model(**torch.utils.data.default_collate(data)).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]

    trainer = adaptive(
        tmp_path,
        bb.Fixed(24),
        gpt(exact=True),
        data,
        micro_batch=micro_batch,
        max_steps=1,
        max_grad_norm=0.0,
        callbacks=[watch := Gradients()],
    )
    trainer.train()
    assert_equal(expected, watch.gradients, rtol=0, atol=1e-10)


def test_micro_batches_of_unequal_length_are_not_glued(tmp_path):
    def shortened(samples):
        batch = torch.utils.data.default_collate(samples)
        longest = int(batch["attention_mask"].sum(1).max())
        return {name: value[:, :longest] for name, value in batch.items()}

    trainer = AdaptiveTrainer(
        model=gpt(),
        args=arguments(tmp_path),
        train_dataset=texts(),
        data_collator=shortened,
        policy=GROWING,
        micro_batch=6,
        every=1,
    )
    trainer.train()
    assert 128 == trainer.adaptive.samples


def assert_step_on(tmp_path, expected, model, data, **options):
    """One step over all the data is along the gradients that a model has."""
    options |= {"max_steps": 1, "max_grad_norm": 0.0, "callbacks": [watch := Gradients()]}
    adaptive(tmp_path, bb.Fixed(len(data)), model, data, **options).train()
    assert_equal([p.grad for p in expected.parameters()], watch.gradients, rtol=0, atol=1e-10)


def test_a_micro_batch_without_labels_adds_nothing(tmp_path):
    data = texts(8, padded=False)
    for sample in data[:4]:
        sample["labels"] = torch.full((LENGTH,), -100)
    model = gpt(exact=True)
    model(**torch.utils.data.default_collate(data)).loss.backward()
    options = {"train_sampling_strategy": "sequential"}
    assert_step_on(tmp_path, model, gpt(exact=True), data, micro_batch=2, **options)


class Plain(nn.Module):
    """A model that knows nothing of numbers of items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WORDS).double()

    def forward(self, input_ids, labels=None):
        scores = self.table(input_ids)
        each = cross_entropy(scores.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return {"loss": each.mean(), "logits": scores}


def test_a_loss_of_ones_own_model_is_a_mean_over_samples(tmp_path):
    data, model = texts(24), Plain()
    batch = torch.utils.data.default_collate(data)
    model(batch["input_ids"], batch["labels"])["loss"].backward()
    assert_step_on(tmp_path, model, Plain(), data, micro_batch=6)


def test_class_weights_of_ones_own_loss_are_those_of_the_uncut_batch(tmp_path):
    """Their sum divides, not the number of labels."""
    rare = torch.linspace(0.1, 9.0, WORDS, dtype=torch.float64)

    class Weighted(AdaptiveTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            scores = model(inputs["input_ids"]).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            return cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=rare)

    data, model = texts(24), gpt(exact=True)
    Weighted.compute_loss(None, model, torch.utils.data.default_collate(data)).backward()
    assert_step_on(tmp_path, model, gpt(exact=True), data, micro_batch=6, kind=Weighted)


@pytest.mark.parametrize("divides", [True, False])
def test_a_loss_function_may_be_a_mean_or_a_sum_over_the_given_items(tmp_path, divides):
    def loss(outputs, labels, num_items_in_batch=None):
        scores, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if divides:
            return cross_entropy(scores, labels, reduction="sum") / num_items_in_batch
        return cross_entropy(scores, labels)

    data = texts(24)
    model = gpt(exact=True)
    model(**torch.utils.data.default_collate(data)).loss.backward()
    model_of_trainer = gpt(exact=True)
    assert_step_on(tmp_path, model, model_of_trainer, data, micro_batch=6, compute_loss_func=loss)


# everything else stays the Trainer's


def test_evaluation_early_stopping_and_the_best_model_work(tmp_path):
    trainer = adaptive(
        tmp_path,
        GROWING,
        num_train_epochs=50,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        eval_dataset=texts(8),
        callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=9.0)],
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert 12 == trainer.state.global_step < trainer.state.max_steps
    assert min(losses) == trainer.state.best_metric
    assert min(losses) == pytest.approx(trainer.evaluate()["eval_loss"])


SHARES = {
    "eval_strategy": "steps",
    "eval_steps": 0.1,
    "save_strategy": "steps",
    "save_steps": 0.3,
    "logging_steps": 0.25,
    "eval_on_start": True,
    "load_best_model_at_end": True,
    "eval_dataset": texts(8),
}


def samples_at(trainer, name):
    """Samples before each line of the log that has the name."""
    lines = [line for line in trainer.state.log_history if name in line]
    return [round(line["epoch"] * 64) for line in lines]


def expected_at(trainer, share):
    """Ends of the steps that reach a share of the two epochs, and of the last."""
    shares = [128 * share * n for n in range(1, math.ceil(1 / share))]
    reached = {next(end for end in samples_at(trainer, "loss") if end > at - 1e-6) for at in shares}
    return sorted(reached | {128})


@pytest.mark.parametrize("policy", [GROWING, Falling(), bb.Fixed(4)], ids=["up", "down", "fixed"])
def test_intervals_that_are_shares_of_a_training_are_shares_of_its_samples(tmp_path, policy):
    """Also after a resumption; a checkpoint comes with an evaluation, or the best is unknown."""
    every = adaptive(tmp_path / "every", policy)
    every.train()
    trainer = adaptive(tmp_path / "run", policy, **SHARES)
    trainer.train()
    assert [0, *expected_at(every, 0.1)] == samples_at(trainer, "eval_loss")
    assert expected_at(every, 0.25) == samples_at(trainer, "loss")
    saved = sorted((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    states = [TrainerState.load_from_json(path / "trainer_state.json") for path in saved]
    assert expected_at(every, 0.3) == [round(state.epoch * 64) for state in states]

    resumed = adaptive(tmp_path / "resumed", policy, **SHARES)
    resumed.train(resume_from_checkpoint=str(saved[1]))
    continued = samples_at(resumed, "eval_loss")
    continued.remove(round(states[1].epoch * 64))  # eval_on_start, where it was saved
    assert samples_at(trainer, "eval_loss") == continued
    assert samples_at(trainer, "loss") == samples_at(resumed, "loss")


def test_intervals_that_are_shares_of_max_steps_count_updates(tmp_path):
    trainer = adaptive(tmp_path, GROWING, max_steps=20, logging_steps=0.2)
    with pytest.warns(UserWarning, match="num_train_epochs ends both together"):
        trainer.train()
    assert [4, 8, 12, 16, 20] == [step for (step,) in logged(trainer, "step")]


def test_gradients_sync_in_the_last_micro_batch_of_an_update_alone(tmp_path):
    class Counting(AdaptiveTrainer):
        updates = backwards = 0

        def compute_loss(self, *given, **named):
            if self.accelerator.sync_gradients:
                self.updates += 1
            self.backwards += 1
            return super().compute_loss(*given, **named)

    trainer = adaptive(tmp_path, GROWING, kind=Counting)
    trainer.train()
    assert trainer.state.global_step == trainer.updates < trainer.backwards / 3


def test_an_evaluation_every_few_updates_changes_nothing(tmp_path):
    plain = adaptive(tmp_path, GROWING)
    evaluated = adaptive(
        tmp_path, GROWING, eval_strategy="steps", eval_steps=2, eval_dataset=texts(8)
    )
    for trainer in (plain, evaluated):
        trainer.train()

    assert logged(plain, *FIGURES) == logged(evaluated, *FIGURES)
    assert_equal(weights(plain), weights(evaluated), rtol=0, atol=0)


def test_logs_and_checkpoints_by_epochs_come_at_their_ends(tmp_path):
    trainer = adaptive(tmp_path, GROWING, logging_strategy="epoch", save_strategy="epoch")
    trainer.train()
    assert [(1.0,), (2.0,)] == logged(trainer, "epoch")
    assert 2 == len(list(tmp_path.glob("checkpoint-*")))


def test_an_update_logs_what_it_measured_and_the_rate_it_used(tmp_path):
    trainer = adaptive(tmp_path, GROWING, logging_steps=3)
    trainer.train()
    record = trainer.adaptive.record
    last = [line for line in trainer.state.log_history if "loss" in line][-1]
    names = "batch_size", "samples", "learning_rate"
    if last["step"] == record.step:
        assert (record.batch_size, record.samples, record.lr[0]) == tuple(last[n] for n in names)
    assert all(math.isfinite(value) for value in last.values())
    assert all(size for (size,) in logged(trainer, "batch_size"))


def test_max_steps_counts_updates_and_says_what_the_rate_follows(tmp_path):
    trainer = adaptive(tmp_path, GROWING, max_steps=20)
    with pytest.warns(UserWarning, match="num_train_epochs ends both together"):
        trainer.train()
    assert 20 == trainer.state.global_step == trainer.adaptive.steps
    assert trainer.state.epoch == trainer.adaptive.samples / 64 > 2


class Stream(torch.utils.data.IterableDataset):
    """Texts that do not say how many they are."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(texts(self.count))


def test_the_epoch_of_a_stream_is_the_share_of_its_steps_as_in_the_plain_trainer(tmp_path):
    plain = Trainer(model=gpt(), args=arguments(tmp_path, max_steps=5), train_dataset=Stream(100))
    plain.train()
    ours = adaptive(tmp_path, bb.Fixed(4), data=Stream(100), max_steps=5)
    ours.train()

    assert logged(plain, "epoch") == logged(ours, "epoch")
    assert 1.0 == ours.state.epoch


def test_the_epoch_of_a_stream_that_was_passed_is_the_share_of_its_data(tmp_path):
    ours = adaptive(tmp_path, bb.Fixed(8), data=Stream(16), max_steps=6)
    ours.train()

    assert [1 / 6, 2 / 6, 1.5, 2.0, 2.5, 3.0] == [epoch for (epoch,) in logged(ours, "epoch")]


class Bar(TrainerCallback):
    """Notes where a progress bar stands when the training ends."""

    def __init__(self):
        self.stands = None

    def on_train_end(self, args, state, control, **others):
        self.stands = self.progress.training_bar.n, self.progress.training_bar.total


@pytest.mark.parametrize("policy", [GROWING, Falling()], ids=["growing", "falling"])
def test_the_progress_bar_of_a_finished_training_is_full(tmp_path, policy):
    trainer = adaptive(tmp_path, policy)
    bar = Bar()
    trainer.add_callback(bar)
    bar.progress = ProgressCallback()
    trainer.add_callback(bar.progress)
    trainer.train()

    assert (trainer.adaptive.steps, trainer.adaptive.steps) == bar.stands


@pytest.mark.parametrize(
    ("policy", "start"),
    [(bb.Controller(GROWING, 8), None), (Patient(), 8)],
    ids=["controller", "policy"],
)
def test_a_second_training_starts_from_the_beginning(tmp_path, policy, start):
    trainer = adaptive(tmp_path, policy, batch_size=start, num_train_epochs=1)
    trainer.train()
    first = logged(trainer, "batch_size", "samples")
    trainer.train()
    assert first == logged(trainer, "batch_size", "samples")


@pytest.mark.late
@pytest.mark.parametrize("where", ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end"])
def test_an_exception_leaves_the_learning_rate_of_the_schedule(tmp_path, where):
    class Failing(TrainerCallback):
        pass

    def fail(self, args, state, control, **others):
        rates.append(optimizer.param_groups[0]["lr"])
        raise ZeroDivisionError("of my own")

    rates = []
    setattr(Failing, where, fail)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = adaptive(
        tmp_path,
        bb.Fixed(16),
        model,
        optimizers=(optimizer, None),
        callbacks=[Failing()],
        lr_scheduler_type="constant",
        base_batch=4,
    )

    with pytest.raises(ZeroDivisionError, match="of my own"):
        trainer.train()
    assert [0.02 if where == "on_optimizer_step" else 0.01] == rates  # sqrt(16 / 4) times .01
    assert 0.01 == optimizer.param_groups[0]["lr"]

    trainer.remove_callback(Failing)
    trainer.train()
    assert {0.02} == {rate for (rate,) in logged(trainer, "learning_rate")}


def test_a_subclass_of_the_trainer_gets_micro_batches(tmp_path):
    class Doubled(Seq2SeqTrainer):
        seen = 0

        def compute_loss(self, *args, **others):
            return 2 * super().compute_loss(*args, **others)

        def training_step(self, model, inputs, num_items_in_batch=None):
            Doubled.seen += len(inputs["labels"])
            return super().training_step(model, inputs, num_items_in_batch)

    class Adaptive(AdaptiveMixin, Doubled):
        pass

    settings = vars(arguments(tmp_path, max_steps=1))
    names = [
        "num_train_epochs", "per_device_train_batch_size", "logging_steps", "report_to",
        "max_steps", "output_dir", "use_cpu", "disable_tqdm", "save_strategy",
    ]  # fmt: skip
    args = Seq2SeqTrainingArguments(**{name: settings[name] for name in names})
    doubled = Adaptive(model=gpt(), args=args, train_dataset=texts(), policy=bb.Fixed(16))
    doubled.train()
    single = adaptive(tmp_path, bb.Fixed(16), max_steps=1)
    single.train()
    assert 16 == Doubled.seen
    assert 2 * logged(single, "loss")[0][0] == pytest.approx(logged(doubled, "loss")[0][0])


def test_a_class_made_from_the_adaptive_one_keeps_its_own_loss(tmp_path):
    class Doubled(AdaptiveTrainer):
        def compute_loss(self, *args, **others):
            return 2 * super().compute_loss(*args, **others)

    doubled = adaptive(tmp_path, bb.Fixed(16), kind=Doubled, max_steps=1)
    doubled.train()
    single = adaptive(tmp_path, bb.Fixed(16), max_steps=1)
    single.train()
    assert 2 * logged(single, "loss")[0][0] == pytest.approx(logged(doubled, "loss")[0][0])


def test_a_training_step_of_a_class_made_from_the_adaptive_one_is_refused(tmp_path):
    class Mine(AdaptiveTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch)

    with pytest.raises(SettingError, match=r"Mine\.training_step.* override compute_loss"):
        adaptive(tmp_path, bb.Fixed(16), kind=Mine)


@pytest.mark.parametrize("behind", [False, True])
def test_a_choice_of_batches_of_ones_own_is_refused(tmp_path, behind):
    class Mine(Trainer if behind else AdaptiveTrainer):
        def get_batch_samples(self, *args):
            return super().get_batch_samples(*args)

    kind = type("Ours", (AdaptiveMixin, Mine), {}) if behind else Mine
    with pytest.raises(SettingError, match=r"Mine\.get_batch_samples is not called"):
        adaptive(tmp_path, bb.Fixed(16), kind=kind)


def test_a_class_made_from_the_adaptive_one_may_make_loader_optimizer_and_schedule(tmp_path):
    class Mine(AdaptiveTrainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, 4)
            return self.accelerator.prepare(loader)

        def create_optimizer(self, *args):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = get_linear_schedule_with_warmup(
                optimizer or self.optimizer, 0, num_training_steps
            )
            return self.lr_scheduler

    trainer = adaptive(tmp_path, bb.Fixed(16), kind=Mine, base_batch=8)
    trainer.train()

    rates = [rate for (rate,) in logged(trainer, "learning_rate")]
    expected = [0.1 * 2**0.5 * (1 - step / 8) for step in range(8)]  # 2 base batches an update
    assert expected == pytest.approx(rates)
    assert 0.0 == trainer.lr_scheduler.get_last_lr()[0]


def test_a_loader_of_ones_own_that_is_not_prepared_is_refused(tmp_path):
    class Mine(AdaptiveTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, 4)

    with pytest.raises(SettingError, match=r"pass what accelerator\.prepare returns"):
        adaptive(tmp_path, bb.Fixed(16), kind=Mine).train()


def test_an_epoch_that_a_callback_ends_within_its_pass_is_refused(tmp_path):
    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_epoch_stop = True

    with pytest.raises(LoopError, match="set should_training_stop"):
        adaptive(tmp_path, GROWING, callbacks=[Ends()]).train()


def test_a_variance_reduced_optimizer_is_that_of_a_loop_by_hand(tmp_path):
    model, other = gpt(), gpt()
    optimizer = VRAdam(model.parameters(), lr=1e-2)
    sequential = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    trainer = adaptive(tmp_path, bb.Fixed(16), model, optimizers=(optimizer, None), **sequential)
    trainer.train()

    loader = torch.utils.data.DataLoader(texts(), 4)
    optimizer = VRAdam(other.parameters(), lr=1e-2)
    train = bb.AdaptiveBatch(other, optimizer, loader, policy=bb.Fixed(16), every=1)
    losses = [record.loss for record in records_of_loop(train, other)]
    assert losses == pytest.approx([loss for (loss,) in logged(trainer, "loss")], rel=1e-4)


def test_a_trainer_that_keeps_metrics_of_its_own_logs(tmp_path):
    """As TRL's do, in `_metrics`."""

    class Keeping(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._metrics = {"train": {}}

    class Adaptive(AdaptiveMixin, Keeping):
        pass

    trainer = adaptive(tmp_path, GROWING, kind=Adaptive, max_steps=3, logging_steps=1)
    trainer.train()
    assert [(8,)] * 3 == logged(trainer, "batch_size")
    assert {"train": {}} == trainer._metrics
