"""A server of OpenAI's API whose pool all requests share, and that keeps the pool from one run to the next.

    pip install starlette uvicorn llguidance
    python examples/server.py --model HuggingFaceTB/SmolLM2-135M-Instruct --pool answers.pool
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def main():"}'

The pool holds what clients have written and read, so give each tenant a server of their own. `lookahead serve` does the
same on the command line, but leaves the file of its pool as it is.
"""

import argparse
import signal
import sys
from pathlib import Path

import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import NgramPool, vocabulary_fingerprint
from lookahead.tools.server import make_app

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=str(lookahead.DEMO_MODEL))
parser.add_argument("--pool", type=Path, default=Path("answers.pool"))
parser.add_argument("--port", type=int, default=8000)
arguments = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
vocabulary = vocabulary_fingerprint(tokenizer)
if arguments.pool.exists():
    pool = NgramPool.load(arguments.pool, vocabulary)  # refuses a damaged file, or one of another vocabulary
else:
    pool = NgramPool(memory_mb=64, vocabulary=vocabulary)
model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(arguments.model).eval(), pool=pool)

signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn closes its connections first, and then passes it on
try:
    uvicorn.run(make_app(model, tokenizer, arguments.model), port=arguments.port, timeout_graceful_shutdown=5)
finally:
    pool.save(arguments.pool)  # atomic: a crash leaves the old file
