"""Attention on a CPU, in C++: a few queries, many keys, and a mask for the last of them alone.

For so few queries, torch's own kernel takes about twice as long. Built on first use, by the C++ compiler of the
machine, if there is one, and kept in the user's cache directory.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs
import torch
import xxhash

logger = logging.getLogger(__name__)

WIDEST = 256  # head_dim, as in the source
FOLDER = Path(platformdirs.user_cache_dir("lookahead")) / "kernels"
_INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
_BF16 = ("-mavx512bf16",) if getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() else ()
_FLAGS = "-x", "c++", "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"
_ARGUMENTS = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 10 + [ctypes.c_float]


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attend` takes these."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and (mask is None or (mask.dtype == query.dtype and mask.stride(3) == 1))
        and len(query) == 1
        and query.shape[3] <= WIDEST
        and query.stride(3) == 1
        and key.stride() == value.stride()
        and key.stride()[2:] == (key.shape[3], 1)
        and not (torch.is_grad_enabled() and query.requires_grad)
        and not torch.compiler.is_compiling()
        and _library() is not None
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of one sequence's tokens: [1, T, heads, head_dim], in the dtype of the inputs, summed in float32.

    query: [1, heads, T, head_dim]; key, value: [1, key heads, L + T, head_dim].
    mask: [1, 1, T, masked], added to the scores of the last ``masked`` keys, those before being seen by all; None: each
    token sees all up to itself.
    """
    _, heads, rows, size = query.shape
    out = query.new_empty(1, rows, heads, size)
    if mask is not None:
        mask = mask.contiguous()
    _library()[query.dtype](
        query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(),
        heads, key.shape[1], rows, key.shape[2], 0 if mask is None else mask.shape[3], size,
        query.stride(1), query.stride(2), key.stride(1), torch.get_num_threads(),
        size**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out


@cache
def _library() -> dict[torch.dtype, "ctypes._CFuncPtr"] | None:
    """The kernel for each dtype; None where it cannot be built."""
    try:
        library = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        logger.info("attention is torch's own, for the quicker one cannot be built: %s\n%s", error, output)
        return None
    kernels = {torch.float32: library.attend_float32, torch.bfloat16: library.attend_bfloat16}
    for kernel in kernels.values():
        kernel.argtypes, kernel.restype = _ARGUMENTS, None
    return kernels


def _built() -> Path:
    """The shared library, which is built unless it was before, of the same source in the same way."""
    source = Path(__file__).with_suffix(".cpp").read_bytes()
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "g++"]
    command = [*compiler, *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()), *_BF16, *_FLAGS]
    path = FOLDER / f"tree-attention-{xxhash.xxh3_64_hexdigest(source + repr(command).encode())}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            new = Path(folder) / path.name
            subprocess.run([*command, "-", "-o", str(new)], input=source, capture_output=True, check=True, timeout=120)
            os.replace(new, path)
    return path
