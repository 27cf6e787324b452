"""Takes the kernels from the folder KERNELS, as `test_native.py` has built them, for the capability CAPABILITY.

It is imported before anything else of the package, which looks at the capability when it is imported.
"""

import os
from pathlib import Path

import torch

from lookahead.cpu import native

native.FOLDER = Path(os.environ["KERNELS"])
native.CAPABILITY = os.environ["CAPABILITY"]
native.HAS_TILES = native.CAPABILITY == "AVX512_AMX"
torch.set_num_threads(1)
if native.why_missing():
    raise SystemExit(f"it was not built, or cannot be loaded: {native.why_missing()}")
