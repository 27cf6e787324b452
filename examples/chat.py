"""A chat in the terminal that gets faster with use: what one chat has learned helps the next.

    python examples/chat.py path/or/name

Without a model, it is the packaged one, which only continues Python. `lookahead chat` can do more.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import NgramPool, vocabulary_fingerprint

POOL = Path("chat.pool")

path = sys.argv[1] if len(sys.argv) > 1 else lookahead.DEMO_MODEL
tokenizer = AutoTokenizer.from_pretrained(path)
if tokenizer.chat_template is None:
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
name = vocabulary_fingerprint(tokenizer)
pool = NgramPool.load(POOL, vocabulary=name) if POOL.exists() else NgramPool(vocabulary=name)
model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), pool=pool)

messages = []
try:
    while True:
        messages.append({"role": "user", "content": input("> ")})
        answer = ""
        for piece in lookahead.stream(model, tokenizer, messages, max_new_tokens=200):
            print(piece, end="", flush=True)
            answer += piece
        messages.append({"role": "assistant", "content": answer})
        print(f"\n[{model.lookahead.last.tokens_per_step:.1f} tokens a step]")
except (EOFError, KeyboardInterrupt):
    pool.save(POOL)  # it holds what was said; only you can read the file
    print(f"\n{POOL} keeps what was learned.")
