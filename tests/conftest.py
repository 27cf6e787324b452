"""What holds for all tests."""

import signal

import pytest
import torch

from lookahead.passes import costs, verdicts

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores, and its children
torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where others use the processor too


@pytest.fixture(autouse=True, scope="session")
def costs_of_tiny_models(tmp_path_factory):
    """Measured in no time, and kept out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "FOLDER", tmp_path_factory.mktemp("step-costs"))
        patch.setattr(costs, "SECONDS", 0.02)
        yield


@pytest.fixture(autouse=True, scope="session")
def verdicts_are_not_kept():
    """Tests change our own code while they run, and a verdict would outlive that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "path_of", lambda *args: None)
        yield
