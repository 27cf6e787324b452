# Everything sets itself up in a local virtual environment. On Linux without a GPU, PyPI's torch brings gigabytes of CUDA;
# `make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"` takes the CPU build instead.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
INSTALLED := $(VENV)/installed
WITH_TESTS := $(VENV)/installed-with-tests

.PHONY: demo test format clean

demo: $(INSTALLED)
	$(VENV)/bin/lookahead generate --prompt-file demo_prompt.txt --temperature 0.6 --seed 1 --max-new-tokens 256 --compare

test: $(WITH_TESTS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest

format: $(WITH_TESTS)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable .
	touch $@

$(WITH_TESTS): $(INSTALLED)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV)
