#!/bin/sh
# Run the core tests with the oldest and the newest transformers that pyproject.toml allows. In the repository's root:
#
#     sh scripts/test_versions.sh PYTHON DIR
#
# Each version gets its own environment, DIR/oldest or DIR/newest, with transformers and its requirements. Everything
# else, above all torch, comes from PYTHON's environment. PIP_FLAGS holds options for pip.
set -eu

[ $# -eq 2 ] || { echo "usage: sh $0 PYTHON DIR" >&2; exit 2; }
PYTHON=$1
DIR=$2
PIP_FLAGS=${PIP_FLAGS:-}
OLDEST=$(sed -n 's/.*"transformers>=\([0-9.]*\),<[0-9.]*".*/\1/p' pyproject.toml)
BEYOND=$(sed -n 's/.*"transformers>=[0-9.]*,<\([0-9.]*\)".*/\1/p' pyproject.toml)
[ -n "$OLDEST" ] && [ -n "$BEYOND" ] || { echo "pyproject.toml names no range of transformers" >&2; exit 1; }

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

tests_with() {
    "$PYTHON" -m venv "$DIR/$1"
    packages "$PYTHON" >"$(packages "$DIR/$1/bin/python")/beneath.pth"
    # shellcheck disable=SC2086
    "$DIR/$1/bin/python" -m pip install $PIP_FLAGS --upgrade "$2"
    "$DIR/$1/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    "$DIR/$1/bin/python" -m pytest tests/test_lossless.py tests/test_generate.py tests/test_batches.py \
        tests/test_cache.py tests/test_continuation.py tests/test_streaming.py tests/test_chat.py tests/test_draft.py
}

tests_with oldest "transformers==$OLDEST"
tests_with newest "transformers<$BEYOND"
