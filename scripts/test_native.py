"""Run the C++ under sanitizers, the kernels with each set of instructions that this machine has.

Each flavour is built with address and undefined-behaviour sanitizers, and runs the kernels' tests and random programs
(`native/fuzz.py`). The flavour "pool" runs the tests of the n-gram pools' loops. The threads of the narrowest flavour
run under ThreadSanitizer, with std::thread instead of OpenMP (`native/threads.cpp`). AMX is also emulated
(`native/emulated_amx.h`), because sanitizers do not check its loads. Libraries stay in the folder until a source
changes.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lookahead.cpu import native
from ngram_pool import cpp

HERE = Path(__file__).parent / "native"
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

EMULATED, POOL = "AVX512_AMX, emulated", "pool"
TESTS = [
    "tests/kernels/test_tree_attention.py",
    "tests/kernels/test_blocks.py",
    "tests/kernels/test_products.py",
    "tests/kernels/test_gguf.py",
    "tests/exactness/test_known_draws.py",
]
POOL_TESTS = "tests/pool/test_loops.py"
KERNEL_TESTS = (
    "formula or with_blocks or each_code or found or packed or indexed or exceptions or rounded or number or draws "
    "or likeliest"
)
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
RUNTIMES = {"address": ("libasan.so", "libstdc++.so.6"), "thread": ("libtsan.so",)}


def flavours() -> list[str]:
    """Flavours that this machine can run: the pool's, then the kernels', the widest first."""
    can_run = list(native.FLAVOURS[native.FLAVOURS.index(native.CAPABILITY) :])
    return [POOL, EMULATED, *can_run] if "AVX512_BF16" in can_run else [POOL, *can_run]


def capability(flavour: str) -> str:
    return flavour.split(",")[0]


def build(folder: Path, flavour: str, sanitizer: str) -> None:
    """Build the library in the folder, unless it exists."""
    package = setup.POOL if flavour == POOL else setup.KERNELS
    kind = "DEFAULT" if flavour == POOL else capability(flavour)
    level = "-O1" if sanitizer == "thread" else "-O0"
    # With assertions, which users' libraries do not have.
    options = [*setup.KINDS[package][kind], "-UNDEBUG", level, "-g1", "-w"]
    if flavour == EMULATED:
        options += ["-DEMULATED_AMX", f"-I{HERE}"]
    compiler, sources = [*setup.compiler(), *SANITIZERS[sanitizer]], [*(ROOT / package).glob("*.cpp")]
    hashed = hashlib.sha256(repr((compiler, setup.FLAGS, options)).encode())
    for source in sorted([*HERE.glob("*.h"), HERE / "threads.cpp"]):
        hashed.update(source.read_bytes())
    library, stamp = folder / f"{kind}-{cpp.digest(ROOT / package)}.so", folder / "options.txt"
    if library.exists() and stamp.exists() and stamp.read_text() == hashed.hexdigest():
        return
    for old in folder.glob("*.so"):
        old.unlink()
    linking = ["-fopenmp"]
    if sanitizer == "thread":
        threads = folder / "threads.o"
        hide = ["-std=c++17", "-fvisibility=hidden", "-fPIC", "-O1", "-g1", "-c"]
        subprocess.run([*compiler, *hide, str(HERE / "threads.cpp"), "-o", str(threads)], check=True)
        linking = [str(threads), "-lpthread"]
    setup.build_library(library, compiler, options, linking, sources)
    stamp.write_text(hashed.hexdigest())


def runtime(name: str) -> str:
    """The path of a library that belongs to the compiler."""
    command = [*setup.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(
            f"{command[0]} has no {name}, which the sanitizers need: install gcc (apt-get install g++), or set "
            "CXX to a compiler that has it"
        )
    return path


def run(folder: Path, flavour: str, sanitizer: str, command: list[str]) -> bool:
    """Run Python with these kernels. Returns whether the sanitizers found nothing."""
    of_flavour = (
        {"POOL": str(folder)} if flavour == POOL else {"KERNELS": str(folder), "CAPABILITY": capability(flavour)}
    )
    environment = os.environ | {
        **of_flavour,
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES[sanitizer])),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    result = f"status {done.returncode}" if done.returncode else "nothing found"
    print(f"{done.stdout}{sanitizer}, {flavour}: {' '.join(command[:2])}: {result}", flush=True)
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200, help="random programs for each flavour (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them (default: 0)")
    parser.add_argument("--flavours", nargs="+", default=flavours(), choices=flavours(), help="default: all of these")
    parser.add_argument("--sanitizers", nargs="+", default=[*SANITIZERS], choices=[*SANITIZERS], help="default: both")
    parser.add_argument("--no-tests", action="store_true", help="only random programs")
    parser.add_argument("--folder", type=Path, default=ROOT / ".native", help="for the libraries (default: .native)")
    options = parser.parse_args()
    missing = [name for name in native.FLAVOURS if name not in map(capability, options.flavours)]
    jobs = [("address", flavour) for flavour in options.flavours if "address" in options.sanitizers]
    jobs += [("thread", options.flavours[-1])] * ("thread" in options.sanitizers and options.flavours != [POOL])
    folders = {job: options.folder / "-".join(job).replace(", ", "-") for job in jobs}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for built in [pool.submit(build, folders[job], job[1], job[0]) for job in jobs]:
            built.result()
    print("built; not run (not possible here, or left out):", ", ".join(missing) or "none", flush=True)
    pytest = ["-m", "pytest", "-p", "sanitized", "-p", "no:cacheprovider", "-q", "-n0"]
    fuzz = [str(HERE / "fuzz.py"), str(options.programs), str(options.first)]
    runs = []
    for job in jobs:
        if job[1] == POOL:
            runs.append((job, [*pytest, POOL_TESTS]))
            continue
        if not options.no_tests and job[0] == "address":
            runs.append((job, [*pytest, "-k", KERNEL_TESTS, *TESTS]))
        runs.append((job, fuzz))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each of them computes in one thread, but for ThreadSanitizer's
        done = [pool.submit(run, folders[job], job[1], job[0], command) for job, command in runs]
    sys.exit(not all(one.result() for one in done))


if __name__ == "__main__":
    main()
