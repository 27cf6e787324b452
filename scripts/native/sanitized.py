"""Load the libraries of `test_native.py`: kernels for the capability CAPABILITY from the folder KERNELS, or the loops
of pools from the folder POOL.

Import it before the package, which reads the capability when it is imported.
"""

import os
from pathlib import Path

import torch

from lookahead.cpu import native
from ngram_pool import native as of_pools
from ngram_pool import pool

torch.set_num_threads(1)
if "POOL" in os.environ:
    of_pools.KERNELS = Path(os.environ["POOL"])
    pool.loops = of_pools.loops()
    missing = of_pools.why_missing()
else:
    native.FOLDER = Path(os.environ["KERNELS"])
    native.CAPABILITY = os.environ["CAPABILITY"]
    native.HAS_AMX = native.CAPABILITY == "AVX512_AMX"
    missing = native.why_missing()
if missing:
    raise SystemExit(f"the library was not built, or cannot be loaded: {missing}")
