"""Grammars are compiled in a process of their own first, which can be ended: nothing else ends a compilation.

What a schema takes cannot be seen from it. 300 properties by pattern take a second, and 2,000 of them many minutes; a
number that must be a multiple of four primes takes 50 characters, and more memory than there is.
"""

import asyncio
import hashlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection

from lookahead.tools.server.fields import RefusedError

SECONDS = 6  # of a processor, at most
AT_ONCE = 2  # processes
STACK = 2**27  # bytes, of a thread that compiles grammars
MOST_KNOWN = 1024  # grammars that need not be compiled here again

# What is compiled then is compiled here, but for a tokenizer whose tokens are bytes and the special ones: the model's
# takes a second to load.
COMPILE = """
import json, os, sys, threading
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
except (ImportError, OSError):
    pass
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
grammar, special = json.load(sys.stdin)
class Bytes:
    tokens = [bytes([i]) for i in range(256)] + [token.encode() for token in special or ["</s>"]]
    special_token_ids, bos_token_id, eos_token_id = range(256, len(tokens)), None, 256
    __call__ = staticmethod(list)
threading.stack_size(int(sys.argv[2]))
compiling = threading.Thread(target=LLMatcher, args=[LLTokenizer(TokenizerWrapper(Bytes())), grammar])
compiling.start()
compiling.join(0.5)
if compiling.is_alive() and sys.platform == "linux":  # where threads have priorities of their own
    os.setpriority(os.PRIO_PROCESS, compiling.native_id, 10)
"""


class Rehearsals:
    """Only one event loop may use them."""

    def __init__(self, special: Collection[str]) -> None:
        """special: the model's special tokens."""
        self._special = list(special)
        self._known: dict[bytes, None] = {}  # digests; the oldest is first
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def rehearse(self, grammar: str) -> None:
        """Return if a grammar can be compiled within seconds. Raises RefusedError if not."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest in self._known:
            return
        async with self._turns:
            command = sys.executable, "-c", COMPILE, str(SECONDS), str(STACK)
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)
            try:
                await process.communicate(json.dumps([grammar, self._special]).encode())
            finally:
                if process.returncode is None:  # whoever has asked is gone
                    process.kill()
        if process.returncode:
            raise RefusedError(
                f"the schema cannot be enforced: to compile it takes more than {SECONDS} seconds; give it fewer "
                "properties, above all by pattern (patternProperties), fewer alternatives (anyOf), or smaller numbers "
                "(multipleOf)"
            )
        self._known[digest] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
