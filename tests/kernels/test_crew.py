"""How many threads compute a pass: fewer where other programs keep processors busy, and for no longer than that."""

import pytest
import torch

from lookahead.cpu.executor import Crew


@pytest.fixture
def crew_of(monkeypatch):
    """Returns a function that runs passes of a crew; the largest share lost follows from the number of threads."""

    def run(threads, lost, passes):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        crew, sizes = Crew(), []
        for number in range(passes):
            sizes.append(crew.size())
            crew.follow(lost(sizes[-1], number))
        return sizes

    return run


def test_on_a_quiet_machine_all_compute(crew_of):
    assert set(crew_of(4, lambda size, number: 0.02, 200)) == {4}


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_beside_a_busy_program_there_is_one_less_within_a_few_passes(crew_of, threads):
    sizes = crew_of(threads, lambda size, number: 0.6 if size == threads else 0.0, 200)
    assert set(sizes[3:]) == {threads, threads - 1}
    assert sizes[3:].count(threads) <= len(sizes) / Crew.PASSES


def test_once_the_program_has_ended_all_compute_again(crew_of):
    sizes = crew_of(2, lambda size, number: 0.6 if size == 2 and number < 50 else 0.0, 200)
    assert 1 in sizes
    assert set(sizes[50 + Crew.PASSES :]) == {2}


def test_more_threads_than_processors_become_as_many(crew_of):
    sizes = crew_of(8, lambda size, number: max(0.0, 1 - 2 / size), 400)
    assert sizes[-100:].count(2) > 90
    assert max(sizes[-100:]) == 3


def test_a_quota_that_stops_all_threads_now_and_then_takes_none(crew_of):
    """1.5 of two processors: in every tenth of a second, a pass of 10 ms waits for 25 ms more."""
    assert set(crew_of(2, lambda size, number: 0.7 if number % 8 == 7 else 0.0, 200)) == {2}


def test_one_thread_is_left(crew_of):
    assert crew_of(2, lambda size, number: 0.9, 100).count(1) > 90


def test_another_number_of_threads_is_taken_at_once(monkeypatch):
    crew = Crew()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(4):
        crew.size()
        crew.follow(0.9)
    assert crew.size() == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert crew.size() == 4
