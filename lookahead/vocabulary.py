"""Which vocabulary the ids of a pool belong to, and which of its tokens are special."""

import json

import xxhash
from transformers import PreTrainedTokenizerBase


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hexadecimal digits that are the same for two tokenizers exactly if they give their tokens the same ids.

    For `NgramPool(vocabulary=...)` and `NgramPool.load(path, vocabulary=...)`.
    """
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(tokens).encode())


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that ``tokenizer.decode(ids, skip_special_tokens=True)`` leaves out, by their ids.

    ``tokenizer.all_special_tokens`` has only those with a role, such as the end of a text.
    """
    with_roles = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return with_roles | {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
