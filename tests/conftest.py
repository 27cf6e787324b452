"""What holds for all tests."""

import functools
import gc
import math
import os
import signal
import zlib
from collections import Counter

import hypothesis
import pytest
import torch

from lookahead.passes import costs, stored, verdicts

# What a run may leave out: all but a SHARE of the examples of property tests; all but one PART ("0/3" is the first of
# three) of the MANY cases of a test, of the MANY tests of a file AROUND the engine, and of tests that take long; all
# cases but one of each family.
SHARE, PART, ONCE = map(os.environ.get, ("LOOKAHEAD_SHARE", "LOOKAHEAD_PART", "LOOKAHEAD_ONCE_A_FAMILY"))
MANY = 6
AROUND = {"server", "sources", "tools", "test_graphs.py", "test_integrations.py"}

if SHARE is not None:
    share, whole = float(SHARE), hypothesis.settings.__init__

    @functools.wraps(whole)
    def fewer(self, *given, **options) -> None:
        if "max_examples" in options:
            options["max_examples"] = math.ceil(share * options["max_examples"])
        whole(self, *given, **options)

    hypothesis.settings.__init__ = fewer
    hypothesis.settings.register_profile("share", max_examples=100)  # for tests that set no number
    hypothesis.settings.load_profile("share")


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out cases, if the environment says so."""

    def together(item):
        return item.function if AROUND.isdisjoint((item.path.parent.name, item.path.name)) else item.path

    part, parts = map(int, (PART or "0/1").split("/"))
    cases = Counter(map(together, items))
    seen, kept, left_out = set(), [], []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        key = item.function, given.get("model_type", item)
        is_one_of_many = cases[together(item)] >= MANY or item.get_closest_marker("long") is not None
        is_in_part = not is_one_of_many or zlib.crc32(item.nodeid.encode()) % parts == part
        if is_in_part and not (ONCE and key in seen):
            seen.add(key)
            kept.append(item)
        else:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: two on two cores would wait for each other
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores, and its children
torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where others use the processor too


def pytest_collection_finish(session) -> None:
    """Tests collect garbage by themselves. What stands by now, a million objects of libraries, is none."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def kept_of_models(tmp_path_factory):
    """Out of the user's cache, the same for all processes of a run. Costs of tiny models are measured in no time."""
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "FOLDER", kept)
        patch.setattr(costs, "SECONDS", 0.02)
        yield


@pytest.fixture(autouse=True)
def verdicts_of_code_that_tests_change(request):
    """Not kept: a test that uses `monkeypatch` may change our own code, which a verdict would outlive."""
    if "monkeypatch" not in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "path_of", lambda *args: None)
        yield
