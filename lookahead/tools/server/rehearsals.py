"""Grammars are compiled in a process of their own first, which can be ended: nothing else ends a compilation.

What a schema takes cannot be seen from it. 300 properties by pattern take a second, and 2,000 of them many minutes.
"""

import asyncio
import hashlib
import sys
from asyncio.subprocess import DEVNULL, PIPE

from lookahead.tools.server.fields import RefusedError

SMALL = 2048  # characters of a grammar that takes a fraction of a second, whatever it says
SECONDS = 2  # of a processor, at most; with a tokenizer, a grammar may take three times as long
AT_ONCE = 2  # processes
STACK = 2**27  # bytes, of a thread that compiles grammars
MOST_KNOWN = 1024  # grammars that need not be compiled here again

COMPILE = """
import os, sys, threading
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
    os.nice(10)
except (ImportError, OSError):
    pass
from llguidance import LLMatcher
grammar = sys.stdin.buffer.read().decode()
threading.stack_size(int(sys.argv[2]))
threading.Thread(target=LLMatcher.validate_grammar, args=[grammar]).start()
"""


class Rehearsals:
    """Only one event loop may use them."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}  # digests; the oldest is first
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def rehearse(self, grammar: str) -> None:
        """Return if a grammar can be compiled within seconds. Raises RefusedError if not."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if len(grammar) <= SMALL or digest in self._known:
            return
        async with self._turns:
            command = sys.executable, "-c", COMPILE, str(SECONDS), str(STACK)
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)
            try:
                await process.communicate(grammar.encode())
            finally:
                if process.returncode is None:  # whoever has asked is gone
                    process.kill()
        if process.returncode:
            raise RefusedError(
                f"the schema cannot be enforced: to compile it takes more than {SECONDS} seconds; give it fewer "
                "properties, above all by pattern (patternProperties), and fewer alternatives (anyOf)"
            )
        self._known[digest] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
