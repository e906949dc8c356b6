"""What processes that were started together have in common, without starting them."""

import socket
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from bigbatch.errors import RankError, RunError
from bigbatch_recipes.new_directory import reserve
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.study import start_study
from bigbatch_recipes.torchrun import Launch


def never():
    raise AssertionError("an attempt after the first chose again")


def begin(place):
    place.mkdir()
    (place / "settings.json").touch()


def test_workers_after_a_restart_continue_where_the_first_began(tmp_path):
    place, store = tmp_path / "run-1", dist.HashStore()
    assert (place, False) == Launch(store).choose_directory(lambda: place)
    assert (place, False) == Launch(store).choose_directory(
        never
    )  # nothing was written before the restart
    begin(place)
    assert (place, True) == Launch(store).choose_directory(never)


def test_an_empty_directory_is_no_begun_run(tmp_path):
    store = dist.HashStore()
    assert (tmp_path / "run", False) == Launch(store).choose_directory(lambda: tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert (tmp_path / "run", False) == Launch(store).choose_directory(never)
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(RunError, match="already in use"):
        Launch(store).choose_directory(never)


@pytest.fixture
def launch(monkeypatch):
    """`launch(name)` is one of that name, whose store is new, as where rank 0's worker keeps it."""

    def named(name):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        return Launch(dist.HashStore())

    return named


def run_of(path, launch):
    RunDirectory.create(path, {}, launch.id)


def study_of(path, launch):
    start_study(RECIPES["digits"], path, RECIPES["digits"].settings(), 1, launch.id)


@pytest.mark.parametrize("begin", [run_of, study_of])
def test_a_restart_without_the_store_knows_what_its_launch_began(tmp_path, launch, begin):
    def fresh(launch):
        return launch.choose_directory(lambda: reserve(tmp_path, "run", launch.id))

    begin(tmp_path / "run-1", launch("other"))
    place = tmp_path / "run-2"
    assert (place, False) == fresh(launch("mine"))
    begin(place, launch("mine"))
    for choose in (fresh, lambda launch: launch.choose_directory(lambda: place)):
        with pytest.warns(UserWarning, match="run-2, which launch mine began"):
            assert (place, True) == choose(launch("mine"))
    for other in ("other", "none"):
        with pytest.raises(RunError, match="already in use"):
            launch(other).choose_directory(lambda: place)


def test_a_launch_without_a_name_knows_no_run_by_it(tmp_path, launch):
    run_of(tmp_path / "run-1", launch("none"))
    assert not (tmp_path / "run-1" / "launch.txt").exists()
    with pytest.raises(RunError, match="already in use"):
        launch("none").choose_directory(lambda: tmp_path / "run-1")
    assert tmp_path / "run-2" == reserve(tmp_path, "run", launch("none").id)


def test_a_lost_rank_is_reported_once_with_the_way_to_continue(capsys):
    store = dist.HashStore()
    for _ in range(2):
        Launch(store).report_failure(dist.DistNetworkError("Connection closed by peer. At gloo."))
    err = capsys.readouterr().err
    assert 1 == err.count("another rank was lost (Connection closed by peer)")
    assert "--max-restarts" in err


class GoneStore(dist.Store):
    """As a client's is when the process that kept it has ended."""

    def add(self, key, value):
        raise dist.DistNetworkError("failed to send, got error 32: Broken pipe")


def test_what_goes_wrong_is_reported_without_the_store_too(capsys):
    Launch(GoneStore()).report_error("why")
    assert "bigbatch: why\n" == capsys.readouterr().err


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"])
def test_workers_started_again_tell_again(monkeypatch, capsys, name):
    store = dist.HashStore()
    for attempt in (29500, 29501):
        monkeypatch.setenv(name, str(attempt))
        Launch(store).report_error("why")
    assert "bigbatch: why\n" * 2 == capsys.readouterr().err


def test_a_restart_does_not_continue_with_what_others_left(tmp_path):
    begin(tmp_path / "theirs")
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(RunError, match="already in use; nothing was overwritten"):
            Launch(store).choose_directory(lambda: tmp_path / "theirs")


def test_without_ranks_every_place_must_be_free(tmp_path):
    assert (tmp_path / "run", False) == Launch().choose_directory(lambda: tmp_path / "run")
    begin(tmp_path / "run")
    with pytest.raises(RunError, match="already in use"):
        Launch().choose_directory(lambda: tmp_path / "run")


def test_what_all_ranks_say_is_written_once(capsys):
    store = dist.HashStore()
    ranks = [Launch(store) for _ in range(3)]
    for rank in ranks:
        rank.report_error("the disk\nis full")
    ranks[2].report_error("so is this one")
    assert "bigbatch: the disk is full\nbigbatch: so is this one\n" == capsys.readouterr().err


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_rank_that_lost_another_says_so_where_that_did_not(capsys):
    message, killed = dist.HashStore(), dist.HashStore()
    Launch(message).report_error("why")
    Launch(message).report_failure(CLOSED)
    assert "bigbatch: why\n" == capsys.readouterr().err
    Launch(killed).report_failure(CLOSED)
    Launch(killed).report_failure(dist.DistNetworkError("Broken pipe"))
    line = capsys.readouterr().err
    assert (1, True) == (line.count("\n"), "--max-restarts N would continue" in line)


def test_a_rank_that_fails_is_named_with_its_error_and_the_others_are_silent(capsys):
    error, store = IndexError("no label\n11"), dist.HashStore()
    error.add_note("bigbatch: what to do")
    error.add_note("of somebody else")
    Launch(store).report_failure(error)
    traced, _, line = capsys.readouterr().err.partition("bigbatch: rank ")
    assert "0 of 1: IndexError: no label 11; what to do\n" == line
    assert "of somebody else" in traced
    Launch(store).report_failure(CLOSED)
    assert "" == capsys.readouterr().err
    with pytest.raises(IndexError):  # alone: as Python ends
        Launch().report_failure(error)


@pytest.mark.parametrize("taken", [True, False])
def test_ranks_that_do_not_meet_say_where_in_one_line(bigbatch, monkeypatch, taken):
    """Rank 0's port is somebody else's; rank 1 finds nobody there."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if taken:
            other.listen()
        port = other.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": "0" if taken else "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        soon = partial(dist.rendezvous, timeout=timedelta(seconds=1))  # else after 30 minutes
        monkeypatch.setattr(dist, "rendezvous", soon)
        status, _, err = bigbatch("train", "digits")
    assert (2, 1) == (status, err.count("\n"))
    assert f"bigbatch: the ranks did not meet at 127.0.0.1:{port} (" in err


def test_ranks_without_an_address_are_refused(bigbatch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = bigbatch("train", "digits")
    assert (2, 1) == (status, err.count("\n"))
    assert "start the ranks by torchrun, or unset WORLD_SIZE" in err
    with pytest.raises(RankError):
        Launch.join(trains=True)


@pytest.mark.parametrize(("rank", "lines"), [("0", True), ("1", False)])
def test_what_trains_nothing_is_done_once(bigbatch, monkeypatch, rank, lines):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    status, out, err = bigbatch("list")
    assert (0, "", lines) == (status, err, "digits" in out)
