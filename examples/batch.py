"""Answer a file of prompts in batches, with a progress bar; one pool learns from all of them.

    python examples/batch.py prompts.jsonl answers.jsonl path/or/name

Each line of prompts.jsonl is an object with "prompt". Each line of answers.jsonl is the same object with "answer", in
the same order, written as soon as its batch is done.
"""

import json
import sys
from pathlib import Path

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead

SIZE = 4  # prompts in a batch: scripts/compare_batches.py measures what pays

if len(sys.argv) < 3:
    sys.exit(__doc__)
prompts, answers, path = (*sys.argv[1:], lookahead.DEMO_MODEL)[:3]
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(path, dtype="auto"))

lines = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
with open(answers, "w", encoding="utf-8") as out, tqdm(total=len(lines), unit="prompt") as bar:
    for begin in range(0, len(lines), SIZE):
        batch = lines[begin : begin + SIZE]
        inputs = tokenizer([line["prompt"] for line in batch], padding=True, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=100)[:, inputs.input_ids.shape[1] :]
        for line, text in zip(batch, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
            out.write(json.dumps({**line, "answer": text}) + "\n")
        out.flush()
        bar.set_postfix_str(f"{model.lookahead.stats.tokens_per_step:.1f} tokens a step")
        bar.update(len(batch))
