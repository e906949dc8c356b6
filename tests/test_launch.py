"""What processes that were started together have in common, without starting them."""

import pytest
import torch.distributed as dist

from bigbatch.errors import RankError, RunError
from bigbatch.recipes.launch import Launch


def never():
    raise AssertionError("an attempt after the first chose anew")


def begin(place):
    place.mkdir()
    (place / "config.yaml").touch()


def test_workers_after_a_restart_go_on_where_the_first_began(tmp_path):
    place, store = tmp_path / "run-1", dist.HashStore()
    assert (place, False) == Launch(store).place(lambda: place)
    assert (place, False) == Launch(store).place(never)  # nothing was written before the restart
    begin(place)
    assert (place, True) == Launch(store).place(never)


def test_a_restart_does_not_go_on_with_what_others_left(tmp_path):
    begin(tmp_path / "theirs")
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(RunError, match="already in use; nothing was overwritten"):
            Launch(store).place(lambda: tmp_path / "theirs")


def test_without_ranks_every_place_must_be_free(tmp_path):
    assert (tmp_path / "run", False) == Launch().place(lambda: tmp_path / "run")
    begin(tmp_path / "run")
    with pytest.raises(RunError, match="already in use"):
        Launch().place(lambda: tmp_path / "run")


def test_what_all_ranks_say_is_written_once(capsys):
    store = dist.HashStore()
    ranks = [Launch(store) for _ in range(3)]
    for rank in ranks:
        rank.tell("the disk\nis full")
    ranks[2].tell("so is this one")
    assert "bigbatch: the disk is full\nbigbatch: so is this one\n" == capsys.readouterr().err


def test_a_rank_that_lost_another_says_so_where_that_did_not(capsys):
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    told, killed = dist.HashStore(), dist.HashStore()
    Launch(told).tell("why")
    Launch(told).tell_lost(closed)
    assert "bigbatch: why\n" == capsys.readouterr().err
    Launch(killed).tell_lost(closed)
    Launch(killed).tell_lost(closed)
    line = capsys.readouterr().err
    assert (1, True) == (line.count("\n"), "--max-restarts N would go on" in line)
    with pytest.raises(RuntimeError, match="shapes"):
        Launch(killed).tell_lost(RuntimeError("shapes do not fit"))


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
    status, out, err = bigbatch("recipes")
    assert (0, "", lines) == (status, err, "digits" in out)
