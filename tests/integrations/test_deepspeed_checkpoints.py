"""Checkpoints of the DeepSpeed connection: bit for bit on as many ranks, and on others."""

import argparse
import io
import itertools
import warnings

import pytest
import torch

from bigbatch.digest import save_state
from bigbatch.errors import StateError
from deepspeed_training import (
    BATCH,
    config_of,
    decaying_schedule,
    engine_of,
    max_difference,
    micro_step,
    network,
    optimizer_of,
    quiet,
    record_values,
    train_steps,
    weights_of,
)

BEFORE, AFTER = 4, 7  # steps; the second pass begins in step 10
UNIVERSAL = {"checkpoint": {"load_universal": True}}
CELLS = [("0", "fp32"), ("0", "bf16"), ("1", "fp32"), ("2", "fp32"), ("2", "bf16"), ("3", "fp32")]


def batches_of(rank, first):
    """A caller's own micro-batches, by number."""
    for number in itertools.count(first):
        draw = torch.Generator().manual_seed(100 * number + rank)
        yield torch.randn(8, 5, generator=draw), torch.randint(3, (8,), generator=draw)


def continued(rank, ranks, folder, layout, dtype, own):
    """The same steps in one go, and by two engines with a checkpoint between."""
    how = {"training_data": None} if own else {}
    results = []
    for stop in (False, True):
        engine, _, loader, _ = engine_of(rank, ranks, layout, dtype, clip=0.25, **how)
        batches = batches_of(rank, 0) if own else loader
        before = train_steps(engine, batches, BEFORE)
        if stop:
            engine.save_checkpoint(folder, client_state={"mine": [1, "two"]})
            engine, _, loader, _ = engine_of(rank, ranks, layout, dtype, clip=0.25, **how)
            path, state = engine.load_checkpoint(folder)
            assert path is not None
            assert state["mine"] == [1, "two"]
            assert "bigbatch" not in state
            micro = sum(record.micro_batches for record in before) // ranks
            batches = batches_of(rank, micro) if own else loader
        after = train_steps(engine, batches, AFTER)
        counted = engine.global_samples, engine.global_steps, engine.train_batch_size()
        results.append(
            (record_values([*before, *after]), weights_of(engine), counted, engine.get_lr())
        )
    return results


@pytest.mark.parametrize("own", [True, False], ids=["own loop", "loader"])
@pytest.mark.parametrize(("layout", "dtype"), CELLS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    deepspeed_ranks, tmp_path, layout, dtype, own
):
    for through, resumed in deepspeed_ranks(2)(continued, str(tmp_path), layout, dtype, own):
        assert through[0] == resumed[0]
        assert all(map(torch.equal, through[1], resumed[1]))
        assert through[2:] == resumed[2:]
        assert len(set(through[0]["batch_size"])) > 2


# on another number of ranks


def by_adam(rank, ranks, layout, **more):
    """DeepSpeed's universal checkpoints hold what Adam remembers, and nothing else."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": decaying_schedule(optimizer)}
    return engine_of(rank, ranks, layout, clip=0.25, more=more, **given)


def saved(rank, ranks, folder, layout):
    engine, _, loader, _ = by_adam(rank, ranks, layout)
    records = train_steps(engine, loader, BEFORE)
    engine.save_checkpoint(folder, tag="saved")
    plan = engine.bigbatch.plan.batch_size
    after = train_steps(engine, loader, AFTER)
    return record_values(records), plan, record_values(after), weights_of(engine)


def resumed(rank, ranks, folder, tag, layout, more):
    engine, _, loader, scheduler = by_adam(rank, ranks, layout, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random states
        engine.load_checkpoint(folder, tag=tag)
    begins = engine.bigbatch.samples, engine.train_batch_size(), scheduler.last_epoch
    return begins, record_values(train_steps(engine, loader, AFTER)), weights_of(engine)


def convert(folder):
    """As `ds_to_universal` on the command line."""
    from deepspeed.checkpoint.ds_to_universal import main

    quiet()
    main(
        argparse.Namespace(
            input_folder=f"{folder}/saved",
            output_folder=f"{folder}/universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


@pytest.mark.parametrize(
    ("layout", "ranks_before", "ranks_after"),
    [("0", 2, 3), ("0", 3, 1), ("1", 2, 3), ("2", 3, 2), ("3", 2, 3)],
)
def test_on_other_ranks_the_run_continues(
    deepspeed_ranks, tmp_path, layout, ranks_before, ranks_after
):
    """By virtual ranks with the same groups, so it is the same curve to rounding."""
    folder, tag, more = str(tmp_path), "saved", {}
    before, plan, expected, weights = deepspeed_ranks(ranks_before)(saved, folder, layout)[0]
    if layout != "0":
        convert(folder)
        tag, more = "universal", UNIVERSAL
    for begins, after, local in deepspeed_ranks(ranks_after)(resumed, folder, tag, layout, more):
        samples = before["samples"][-1]
        assert (samples, plan, samples // BATCH) == begins
        assert expected["batch_size"] == after["batch_size"]
        assert expected["samples"] == after["samples"]
        assert pytest.approx(expected["similarity"], abs=1e-5) == after["similarity"]
        assert max_difference(weights, local) < 1e-5


# what is loaded, and what is not


def loaded_partly(rank, ranks, folder, options):
    engine, _, loader, _ = engine_of(rank, ranks, "2")
    train_steps(engine, loader, BEFORE)
    engine.save_checkpoint(folder)
    weights = weights_of(engine)
    engine = engine_of(rank, ranks, "2")[0]
    path, _ = engine.load_checkpoint(folder, **options)
    assert path is not None
    assert all(map(torch.equal, weights, weights_of(engine)))
    return engine.train_batch_size(), engine.bigbatch.samples, engine.bigbatch.plan.batch_size


@pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_alone_leave_the_batch_alone(deepspeed_ranks, tmp_path, options):
    assert (BATCH, 0, BATCH) == deepspeed_ranks(1)(loaded_partly, str(tmp_path), options)[0]


def without_ours(rank, ranks, folder):
    """A checkpoint of DeepSpeed itself, loaded by us."""
    quiet()
    import deepspeed

    model = network()
    config = config_of(ranks, "1")
    plain = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    for x, y in itertools.islice(batches_of(rank, 0), 12):
        micro_step(plain, x, y)
    plain.save_checkpoint(folder)
    engine, _, loader, _ = engine_of(rank, ranks, "1", lr_scheduler=None)
    with warnings.catch_warnings(record=True, action="always") as said:
        engine.load_checkpoint(folder)
    said = [str(each.message) for each in said if "bigbatch" in str(each.message)]
    assert all(map(torch.equal, weights_of(plain), weights_of(engine)))
    begins = engine.train_batch_size(), engine.bigbatch.samples
    return said, begins, len(train_steps(engine, loader, 2))


def test_a_checkpoint_without_our_state_is_said_on_rank_0_and_starts_again(
    deepspeed_ranks, tmp_path
):
    first, second = deepspeed_ranks(2)(without_ours, str(tmp_path))
    assert len(first[0]) == 1
    assert "was saved without bigbatch" in first[0][0]
    assert [] == second[0]
    for _, begins, steps in (first, second):
        assert (BATCH, 0) == begins
        assert steps == 2


def there_is_none(rank, ranks, folder):
    engine = engine_of(rank, ranks)[0]
    with warnings.catch_warnings(record=True, action="always") as said:
        answer = engine.load_checkpoint(folder)
    return answer, [str(each.message) for each in said if "bigbatch" in str(each.message)]


def test_where_there_is_no_checkpoint_deepspeeds_answer_is_given(deepspeed_ranks, tmp_path):
    assert ((None, None), []) == deepspeed_ranks(1)(there_is_none, str(tmp_path))[0]


class Harmful:
    """What pickle would run when it is loaded."""

    def __reduce__(self):
        return eval, ("1 / 0",)


def tampered(rank, ranks, folder):
    engine, _, loader, _ = engine_of(rank, ranks)
    train_steps(engine, loader, 1)
    engine.save_checkpoint(folder, tag="one")
    path = f"{folder}/one/mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    assert type(state["bigbatch"]["ranks"]) is bytes
    packed = io.BytesIO()
    save_state([Harmful()], packed)  # with a digest that is right
    state["bigbatch"]["ranks"] = packed.getvalue()
    torch.save(state, path)
    try:
        engine_of(rank, ranks)[0].load_checkpoint(folder, tag="one")
    except Exception as error:
        return type(error).__name__
    return "loaded"


def test_what_is_added_to_a_checkpoint_is_loaded_as_weights_only(deepspeed_ranks, tmp_path):
    assert "UnpicklingError" == deepspeed_ranks(1)(tampered, str(tmp_path))[0]


def with_a_loader_or_without(rank, ranks, folder):
    engine, _, loader, _ = engine_of(rank, ranks)
    train_steps(engine, loader, 1)
    engine.save_checkpoint(folder)
    try:
        engine_of(rank, ranks, training_data=None)[0].load_checkpoint(folder)
    except StateError as error:
        return str(error)
    return "loaded"


def test_a_state_with_a_place_in_its_data_is_not_one_of_a_loop_without(deepspeed_ranks, tmp_path):
    said = deepspeed_ranks(1)(with_a_loader_or_without, str(tmp_path))[0]
    assert said.startswith("the state was saved by a loop over a loader of its own")
