"""`lookahead serve`: a server for clients of OpenAI's and Anthropic's APIs around one wrapped model. See docs/serve.md.

app           routes, and requests from their body to their answer
arriving      requests while they arrive: how many, how large, for how long
fields        what a request says: each field honoured, passed over, or refused by name
reading       prompts, with the tokens that the model has written in earlier turns
generations   answers that are decoded at the same time, and the call of ``model.generate``
rehearsals    grammars that are compiled in a process first, which can be ended
prefixes      caches that earlier requests have left
answering     from tokens to pieces of text, stop strings, probabilities
thinking      how long a model reasons
parsing       reasoning, text and calls in an answer
forms         the form of an answer; chats, responses and messages are those of one API each
metrics       counts
"""

import click

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise click.UsageError(
        f"the server needs packages that are missing ({error}): pip install starlette uvicorn llguidance"
    ) from error

from lookahead.tools.server.app import make_app, serve

__all__ = ["make_app", "serve"]
