"""Grammars are compiled in a process of their own first, which can be ended: nothing else ends a compilation.

What a schema takes cannot be seen from it. 300 properties by pattern take a second, and 2,000 of them many minutes; a
number that must be a multiple of four primes takes 50 characters, and more memory than there is.
"""

import asyncio
import hashlib
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE

from lookahead.tools.server.fields import RefusedError

SECONDS = 6  # of a processor, at most
BY_THE_CLOCK = 20 * SECONDS  # beside other programs, and where a system does not limit the former
AT_ONCE = 2  # processes
STACK = 2**27  # bytes, of a thread that compiles grammars
MOST_KNOWN = 1024  # grammars that need not be compiled here again

# What is compiled then is compiled here, but for a tokenizer whose tokens are bytes and a special one, which stands for
# all: the model's tokenizer takes a second to load.
COMPILE = """
import contextlib, os, sys, threading
with contextlib.suppress(ImportError, OSError, ValueError):
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
class Bytes:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    special_token_ids, bos_token_id, eos_token_id = [256], None, 256
    __call__ = staticmethod(list)
grammar = sys.stdin.buffer.read().decode()
threading.stack_size(int(sys.argv[2]))
compiling = threading.Thread(target=LLMatcher, args=[LLTokenizer(TokenizerWrapper(Bytes())), grammar])
compiling.start()
compiling.join(0.5)
if compiling.is_alive() and sys.platform == "linux":  # where threads have priorities of their own
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, compiling.native_id, 10)
"""
SPECIAL = re.compile(r"<\[\d+\]>")  # a special token in a grammar, by its id


class Rehearsals:
    """Only one event loop may use them."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}  # by digest, whether it can be compiled; the oldest is first
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def rehearse(self, grammar: str) -> None:
        """Return if a grammar can be compiled within seconds. Raises RefusedError if not."""
        digest = hashlib.sha256(grammar.encode()).digest()
        can_be = self._known.get(digest)
        if can_be is None:
            async with self._turns:
                can_be = await _can_be_compiled(SPECIAL.sub("<[256]>", grammar))
            if can_be is not None:
                self._known[digest] = can_be
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        if not can_be:
            raise RefusedError(
                f"the schema cannot be enforced: to compile it takes more than {SECONDS} seconds; give it fewer "
                "properties, above all by pattern (patternProperties), fewer alternatives (anyOf), or smaller numbers "
                "(multipleOf)"
            )


async def _can_be_compiled(grammar: str) -> bool | None:
    """None: other programs may have kept the processor busy."""
    command = sys.executable, "-c", COMPILE, str(SECONDS), str(STACK)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)
    try:
        await asyncio.wait_for(process.communicate(grammar.encode()), BY_THE_CLOCK)
    except asyncio.TimeoutError:
        return None
    finally:
        if process.returncode is None:  # it takes too long, or whoever has asked is gone
            process.kill()
    return process.returncode == 0
