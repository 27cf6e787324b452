"""Which vocabulary the ids of a pool belong to."""

import json

import xxhash
from transformers import PreTrainedTokenizerBase


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hexadecimal digits that are the same for two tokenizers exactly if they give their tokens the same ids.

    For `NgramPool(vocabulary=...)` and `NgramPool.load(path, vocabulary=...)`.
    """
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(tokens).encode())
