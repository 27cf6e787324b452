"""Random blocks of GGUF files in each format that our kernels read. gguf can unpack all of them, but pack only some."""

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
"""Offsets of half-precision numbers in a block."""
STEPS = {"Q8_0": 64, "Q2_K": 12, "Q3_K": 32, "Q4_K": 240, "Q5_K": 480, "Q6_K": 1200, "IQ4_NL": 64, "IQ4_XS": 1000}
"""The typical ratio of a weight to its scale; 8 in other formats."""
EXTREMES = np.array([0, -0.0, 2.0**-24, -(2.0**-15), 2.0**-14, 1.0, 65504, -65504], np.float16)


def random_blocks(
    kind: Kind, outputs: int, inputs: int, random: np.random.Generator, size: float, extreme: float = 0.0
) -> np.ndarray:
    """Random blocks, uint8 [outputs, bytes], with weights of about this size. extreme: share of arbitrary scales."""
    weights, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (outputs * inputs // weights, width), np.uint8)
    for place in HALVES[kind.name]:
        halves = (size / STEPS.get(kind.name, 8) * random.standard_normal(len(blocks))).astype(np.float16)
        halves = np.where(random.random(len(blocks)) < extreme, random.choice(EXTREMES, len(blocks)), halves)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == Kind.MXFP4:
        powers = np.log2(size) + 126 + random.integers(-2, 2, len(blocks))
        others = random.choice([0, 1, 2, 64, 200], len(blocks))
        blocks[:, 0] = np.where(random.random(len(blocks)) < extreme, others, powers)
    return blocks.reshape(outputs, -1)
