#!/bin/sh
# Run the core tests with the oldest and the newest transformers that pyproject.toml allows. In the repository's root:
#
#     sh scripts/test_versions.sh PYTHON DIR
#
# Each version gets its own environment, DIR/oldest or DIR/newest, with transformers and its requirements. The newest is
# the one that pip finds today, whatever constraints.txt says. Everything else, above all torch, comes from PYTHON's
# environment. PIP_FLAGS holds options for pip.
set -eu

[ $# -eq 2 ] || { echo "usage: sh $0 PYTHON DIR" >&2; exit 2; }
PYTHON=$1
DIR=$2
PIP_FLAGS=${PIP_FLAGS:-}
OLDEST=$(sed -n 's/.*"transformers>=\([0-9.]*\),<[0-9.]*".*/\1/p' pyproject.toml)
BEYOND=$(sed -n 's/.*"transformers>=[0-9.]*,<\([0-9.]*\)".*/\1/p' pyproject.toml)
[ -n "$OLDEST" ] && [ -n "$BEYOND" ] || { echo "pyproject.toml names no range of transformers" >&2; exit 1; }
# Texts, caches and batches, fused passes, what clients hand to generate(), and the private names that we use.
CORE="tests/exactness/test_lossless.py tests/exactness/test_generate.py tests/exactness/test_batches.py
    tests/engine/test_cache.py tests/exactness/test_continuation.py tests/exactness/test_streaming.py
    tests/tools/test_chat.py tests/sources/test_draft.py tests/exactness/test_fused.py
    tests/exactness/test_integrations.py tests/engine/test_wrapping.py tests/engine/test_compat.py
    tests/server/test_server.py"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

version() { "$1" -c 'from importlib.metadata import version; print(version("transformers"))'; }

tests_with() {
    name=$1 requirement=$2
    shift 2
    "$PYTHON" -m venv "$DIR/$name"
    packages "$PYTHON" >"$(packages "$DIR/$name/bin/python")/beneath.pth"
    # shellcheck disable=SC2086
    "$DIR/$name/bin/python" -m pip install --quiet $PIP_FLAGS --upgrade "$requirement"
    "$DIR/$name/bin/python" -c 'import platform, torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)'
    if [ "$(version "$PYTHON")" = "$(version "$DIR/$name/bin/python")" ]; then
        echo "It is the version of $PYTHON, with which \`make test\` runs all tests."
        return
    fi
    # `make test` has tried all examples of the property tests already.
    LOOKAHEAD_SHARE=0.25 LOOKAHEAD_ONCE_A_FAMILY=1 PYTHONPATH=$PWD \
        "$DIR/$name/bin/python" -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal "$@"
}

# shellcheck disable=SC2086
{
    tests_with oldest "transformers==$OLDEST" $CORE
    tests_with newest "transformers<$BEYOND" $CORE
}
