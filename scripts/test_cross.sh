#!/bin/sh
# Compile the C++ for 64-bit ARM on Linux and on macOS, by cross compilers, and run its check on an emulated ARM. In the
# repository's root, on Debian:
#
#     apt-get install g++-aarch64-linux-gnu qemu-user && pip install ziglang
#     sh scripts/test_cross.sh PYTHON DIR
#
# What is compiled is put into DIR. PYTHON has setuptools, and ziglang for macOS.
set -eu

[ $# -eq 2 ] || { echo "usage: sh $0 PYTHON DIR" >&2; exit 2; }
PYTHON=$1
DIR=$2
FLAGS=$(PYTHONPATH=$PWD "$PYTHON" -c 'import setup; print(*setup.FLAGS)')
mkdir -p "$DIR"

compile() {  # TARGET OPENMP COMPILER...: each source
    target=$1 openmp=$2
    shift 2
    for source in lookahead/cpu/*.cpp ngram_pool/*.cpp scripts/native/check.cpp; do
        # shellcheck disable=SC2086
        "$@" $FLAGS $openmp -Ilookahead/cpu -c "$source" -o "$DIR/$target-$(basename "$source" .cpp).o"
    done
}

compile arm -fopenmp aarch64-linux-gnu-g++
aarch64-linux-gnu-g++ -fopenmp "$DIR"/arm-*.o -o "$DIR/check"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$DIR/check"
compile mac "-Xclang -fopenmp" "$PYTHON" -m ziglang c++ -target aarch64-macos
"$PYTHON" -m ziglang c++ -target aarch64-macos -shared -undefined dynamic_lookup "$DIR"/mac-*.o -o "$DIR/mac.dylib"
echo "compiled and linked for macOS on ARM, not run"
