"""A forked child finds every pool whole and its lock free, whatever other threads were doing with it."""

import os
import random
import signal
import threading
import weakref

import numpy as np
import pytest
from test_pool import learn_something, random_text

from ngram_pool import NgramPool, forks
from ngram_pool.forks import Turn

pytestmark = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="a system without fork")
HANGS = 30  # seconds after which a child is ended by the system


def status_of_child(work) -> int:
    """Exit status of a forked child that does ``work``: 0, 1 for an exception, or -14 where it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def use(*pools: NgramPool) -> None:
    for pool in pools:
        pool.check_integrity()
        learn_something(pool, random.Random(0))
        assert len(pool.guess([1, 2, 3], 8)) > 0
        pool.merge(pools[0])
        pool.check_integrity()
    NgramPool(0.05).learn([1, 2, 3])


def test_a_lock_that_another_thread_holds_is_free_in_the_child():
    pool, taken, waits = NgramPool(0.05), threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            taken.set()
            waits.wait(1)  # longer than the fork takes to begin; it has to wait for this

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    assert status_of_child(lambda: use(pool)) == 0
    holder.join()
    use(pool)  # in the parent, too


def test_forks_while_threads_learn_merge_and_make_pools():
    """Also from several threads at once. No child hangs, and none finds a table half written."""
    pools, over, failures, statuses = [NgramPool(0.3), NgramPool(0.3)], threading.Event(), [], []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            text = np.array(random_text(rng, 20_000, 50))
            while not over.is_set():
                ours, theirs = rng.sample(pools, 2)
                ours.learn(text)
                ours.merge(theirs)
                NgramPool(0.01).merge(ours)
        except Exception as error:
            failures.append(error)

    def fork() -> None:
        for _ in range(8):
            statuses.append(status_of_child(lambda: use(*pools)))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    forkers = [threading.Thread(target=fork) for _ in range(2)]
    for thread in workers + forkers:
        thread.start()
    for thread in forkers:
        thread.join()
    over.set()
    for thread in workers:
        thread.join()
    assert failures == []
    assert statuses == [0] * 16
    use(*pools)


def test_a_fork_in_the_midst_of_a_pool_s_own_work():
    """As from a signal's handler, which runs in the thread that holds the lock."""
    pool = NgramPool(0.05)
    with pool._lock:
        assert status_of_child(lambda: use(pool)) == 0
        use(pool)
    assert status_of_child(lambda: use(pool)) == 0


def test_forks_keep_no_pool_alive():
    pool = NgramPool(0.05)
    known = weakref.ref(pool)
    assert status_of_child(lambda: None) == 0
    del pool
    assert known() is None


def test_a_turn_is_free_in_a_child_unless_the_forking_thread_has_it():
    theirs, mine = Turn(), Turn()
    taken, done = threading.Event(), threading.Event()

    def hold():
        with theirs:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()

    def use():
        assert theirs.acquire(timeout=5)
        theirs.release()
        mine.release()  # as its `with` does
        assert mine.acquire(blocking=False)

    mine.acquire()
    try:
        assert status_of_child(use) == 0
    finally:
        mine.release()
        done.set()
        thread.join()


def test_a_turn_that_is_made_waits_for_no_fork():
    with forks._forking:
        made = threading.Thread(target=Turn)
        made.start()
        made.join(5)
        assert not made.is_alive()
