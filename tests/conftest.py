"""What holds for all tests."""

import functools
import gc
import math
import os
import signal

import hypothesis
import pytest
import torch

from lookahead.passes import costs, verdicts

if "LOOKAHEAD_SHARE" in os.environ:  # the share of examples of property tests, for runs that repeat tests of others
    share, whole = float(os.environ["LOOKAHEAD_SHARE"]), hypothesis.settings.__init__

    @functools.wraps(whole)
    def fewer(self, *given, **options) -> None:
        if "max_examples" in options:
            options["max_examples"] = math.ceil(share * options["max_examples"])
        whole(self, *given, **options)

    hypothesis.settings.__init__ = fewer
    hypothesis.settings.register_profile("share", max_examples=100)  # for tests that set no number
    hypothesis.settings.load_profile("share")

    def pytest_collection_modifyitems(config, items) -> None:
        """Keep one test for each family, and drop its other parameters."""
        seen, kept, left_out = set(), [], []
        for item in items:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            key = item.function, given.get("model_type", item)
            (left_out if key in seen else kept).append(item)
            seen.add(key)
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
def costs_of_tiny_models(tmp_path_factory):
    """Measured in no time, and kept out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "FOLDER", tmp_path_factory.mktemp("step-costs"))
        patch.setattr(costs, "SECONDS", 0.02)
        yield


@pytest.fixture(autouse=True, scope="session")
def verdicts_of_tests(tmp_path_factory):
    """Out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "FOLDER", tmp_path_factory.mktemp("verdicts"))
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
