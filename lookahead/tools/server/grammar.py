"""Answers that must hold: a grammar hides the tokens that would break it, and those that it forces are guesses.

llguidance compiles the grammars. Blanks in JSON are those of Python's json.dumps, so that most of what a schema fixes
is forced.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from lookahead.extending import GuessSource, Limits
from lookahead.sequences import NewTokensProcessor
from lookahead.tools.server.fields import Demand, RefusedError
from lookahead.tools.server.reading import Prompt
from lookahead.vocabulary import special_tokens
from ngram_pool import GuessTree

BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}
REACH = 2**14  # references of a schema times its levels, at most: to compile it may take 3 KB of a stack for each
LISTING = re.compile(r"\n +\d+ \| ")  # after what is wrong, llguidance shows the grammar
FORBIDS = "satisfy the grammar"  # in what llguidance says of a token that it forbids
CLAIM = 0.9  # probability of a token that is forced but for the ways to cut its characters into tokens


@dataclass
class Grammars:
    """Makes grammars for the answers of a model."""

    tokenizer: PreTrainedTokenizerBase
    template: dict | None
    """The response template, which says how the model writes reasoning and calls (`parsing.response_template`)."""
    vocabulary: int
    """Number of logits."""
    ends: set[int]
    """Tokens that end an answer."""
    _reads: LLTokenizer | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._special = special_tokens(self.tokenizer)

    def text(self, demand: Demand, prompt: Prompt, many: bool) -> str:
        """Return the grammar of an answer, for `compiled`. many: whether it may call several tools.

        Raises RefusedError if the demand cannot be enforced.
        """
        fields = (self.template or {}).get("fields", {})
        rules, bodies = [], []
        if demand.schema is not None:
            bodies.append("answer")
            rules.append(f"answer: %json {self._json(demand.schema)}")
        if demand.calls or (prompt.tools and "tool_calls" in fields):
            rules += self._calls(fields.get("tool_calls"), prompt.tools or [], demand.calls, many)
            bodies.append("calls")
        thought = ""
        if (marks := prompt.marks) is not None and (marks.have_begun or prompt.thinks):
            thought = "thought " if marks.have_begun else f"({self._literal(marks.opens)} thought)? "
            is_token = marks.closes in self._special.values()  # then no text is its end
            end = "" if is_token else f"[suffix={json.dumps(marks.closes)}]"
            rules.append(f"thought{end}: /(?s:.*)/ {self._literal(marks.closes) * is_token}")
        start = rf"start: {thought}/\n{{0,2}}/ ({' | '.join(bodies)})"
        return LLMatcher.grammar_from_lark("\n".join([start if thought else f"start: {' | '.join(bodies)}", *rules]))

    def compiled(self, text: str) -> LLMatcher:
        """Return a grammar before any text.

        Other threads run meanwhile: a large schema takes seconds. The thread that calls this needs a stack of 3 KB
        for each of `REACH`, or more.

        Raises RefusedError if it cannot be enforced.
        """
        compiled = LLMatcher(self.reads, text)
        if wrong := compiled.get_error():
            raise RefusedError(f"the schema cannot be enforced: {LISTING.split(wrong)[0]}")
        return compiled

    def blame_a_tool(self, demand: Demand, prompt: Prompt) -> None:
        """Raise RefusedError for the first tool that may be called and whose schema alone cannot be enforced.

        It is called where all of them together cannot: errors of llguidance do not say which it is.
        """
        for number, name, text in self.of_tools(demand, prompt):
            with blamed_tool(number, name):
                self.compiled(text)

    def of_tools(self, demand: Demand, prompt: Prompt) -> list[tuple[int, str, str]]:
        """Return the place and the name of each tool that may be called, and the grammar of a call of it alone."""
        if "tool_calls" not in (self.template or {}).get("fields", {}):
            return []
        functions = _functions(prompt.tools or [], demand.calls)
        names = [(number, str(function["name"])) for number, function in functions]
        return [(number, name, self.text(Demand(calls=(name,)), prompt, many=False)) for number, name in names]

    def enforce(
        self, grammar: LLMatcher, prompt: int, param: str | None = None
    ) -> tuple["HideForbidden", "ForcedTokens"]:
        """Return what makes a text keep to its grammar, and guesses by it.

        prompt: tokens before the text. param: the field of the request that asks for it.
        """
        text = Enforced(grammar.deep_copy(), prompt, self._special, param)
        return HideForbidden(text, self.ends), ForcedTokens(text)

    @property
    def reads(self) -> LLTokenizer:
        """The tokenizer as llguidance takes it, made when it is first asked for, in a second or two."""
        if self._reads is None:
            try:
                self._reads = from_tokenizer(self.tokenizer, self.vocabulary, sorted(self.ends))  # type: ignore[arg-type]  # of any fast tokenizer
            except Exception as error:  # there are many kinds
                raise RefusedError(f"no schema can be enforced with this model's tokenizer: {error}") from error
        return self._reads

    def _calls(self, how: dict | None, tools: Sequence[Any], names: Sequence[str], many: bool) -> list[str]:
        if how is None or how.get("content") != "json" or how.get("transform", {}).get("function") != "{content}":
            raise RefusedError(
                'tool_choice must be "auto" or "none": no call can be enforced in the form that this model uses',
                "tool_choice",
            )
        opens, closes = self._literal(how["open"]), self._literal(how["close"])
        ways, arguments = [], []
        for number, function in _functions(tools, names):
            before = json.dumps({"name": function["name"]}, ensure_ascii=False)[:-1] + ', "arguments": '
            ways.append(f'{json.dumps(before, ensure_ascii=False)} arguments_{number} "}}"')
            # Each schema is a document of its own: its references begin at its root.
            schema = function.get("parameters") or {}
            with blamed_tool(number, function["name"]):
                kinds = schema.get("type", "object")
                if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
                    raise RefusedError("the schema must have the type object: other values are no arguments")
                self._json({"const": function["name"]})  # what it refuses
                arguments.append(f"arguments_{number}: %json {self._json(schema | ANY_OBJECT)}")
        more = r" (/\n?/ call)*" if many else ""
        return [f"calls: call{more}", rf"call: {opens} /\n?/ ({' | '.join(ways)}) /\n?/ {closes}", *arguments]

    def _json(self, schema: dict) -> str:
        return _json(schema, self._special.values())

    def _literal(self, text: str) -> str:
        token = next((token for token, name in self._special.items() if name == text), None)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _functions(tools: Sequence[Any], names: Sequence[str]) -> list[tuple[int, dict]]:
    """Return the functions with these names, or all if there are none, and the places of their tools."""
    functions = enumerate(tool["function"] for tool in tools)
    return [(number, function) for number, function in functions if not names or function["name"] in names]


@contextmanager
def blamed_tool(number: int, name: str) -> Iterator[None]:
    """Let what is refused here name the tool whose schema it is."""
    try:
        yield
    except RefusedError as error:
        says = str(error).replace("the schema", f"the schema of the tool {name!r:.80}", 1)
        raise RefusedError(says, f"tools[{number}]") from error


def _json(schema: dict, special: Collection[str]) -> str:
    """Raises RefusedError for a schema that may be too deep: to compile it would end the process. And for one that
    forces the text of a special token: llguidance would then force the token itself.
    """
    references, levels, inside = set[str](), 0, [schema]
    while inside:
        levels += 1
        objects = [one for one in inside if isinstance(one, dict)]
        texts = [[*one, *map(one.get, ("const", "enum", "required"))] for one in objects]
        fixed = json.dumps(texts, ensure_ascii=False)
        if found := next((token for token in special if token in fixed), None):
            raise RefusedError(f"the schema cannot be enforced: it has {found}, a special token, as a text")
        references |= {one["$ref"] for one in objects if isinstance(one.get("$ref"), str)}
        inside = [value for one in objects for value in one.values()] + [
            value for one in inside if isinstance(one, list) for value in one
        ]
    if len(references) * levels > REACH:
        raise RefusedError(
            f"the schema cannot be enforced: it has {len(references)} different references ($ref) and {levels} levels, "
            f"whose product must be {REACH} at most; write some definitions where they are used, or make it flatter"
        )
    return json.dumps(schema | {"x-guidance": BLANKS})


class Enforced:
    """A text that keeps to a grammar, as far as it is written."""

    def __init__(self, grammar: LLMatcher, prompt: int, special: Iterable[int] = (), param: str | None = None):
        """grammar: followed from here on by this text alone. prompt: its tokens. special: tokens without a text.
        param: at fault for errors.
        """
        self._matcher, self._special, self._param = grammar, list(special), param
        self.length = prompt
        """Tokens of the prompt, and of the answer as far as it was followed."""

    def follow(self, new: list[int]) -> None:
        """Go on with these tokens.

        Raises RefusedError if the grammar grows too large, ValueError if it forbids the tokens.
        """
        self.length += len(new)
        if not new or self._matcher.is_stopped():  # what may still come then are tokens that end the text
            return
        self._matcher.consume_tokens(new)
        self._check()

    @property
    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool [vocabulary]. Raises RefusedError if the grammar grows too large."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little").view(bool)
        is_alone = bool(mask[self._special].any()) and mask.sum() == 1
        if is_alone and not (self.may_end or self._matcher.validate_tokens(mask.nonzero()[0].tolist())):
            # Its text must come next, and llguidance cuts that as the tokenizer does, which takes it for the token.
            raise RefusedError(
                "the schema cannot be enforced: at one place, it allows only the text of a special token, such as by a "
                "pattern",
                self._param,
            )
        return mask

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        why = self._matcher.get_error().partition("\n")[0]
        if FORBIDS in why:
            raise ValueError(f"the text does not keep to its grammar: {why}")
        raise RefusedError(
            f"the schema grows too large while the answer is written ({why}): give it fewer optional properties and "
            "alternatives (anyOf), or shorter patterns and smaller bounds in them",
            self._param,
        )

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def forced(self) -> list[int]:
        """Tokens for the characters that must come next, cut as the tokenizer would."""
        return self._matcher.compute_ff_tokens()


class HideForbidden(NewTokensProcessor):
    """Leaves only the tokens that the grammar of a text allows.

    Other settings hide tokens, too: those that end a text (min_new_tokens), or would repeat it (no_repeat_ngram_size).
    Where they leave none, the text ends if its grammar lets it.
    """

    def __init__(self, text: Enforced, ends: Iterable[int]):
        """ends: tokens that end a text."""
        super().__init__(text.length)
        self._text, self._ends = text, list(ends)

    def change(self, scores: np.ndarray, new: list[int]) -> None:
        self._text.follow(new[self._text.length - self._prompt :])
        scores[~self._text.allowed[: len(scores)]] = -np.inf
        if scores.max() != -np.inf:  # also if one is NaN
            return
        if not self._text.may_end:
            raise RefusedError(
                "no token is left that the schema allows: what else is asked for (such as no_repeat_ngram_size) hides "
                "all of them; leave it out",
                "generation_config",
            )
        scores[self._ends] = 0


class ForcedTokens(GuessSource):
    """Guesses what the grammar of a text forces."""

    is_free = True

    def __init__(self, text: Enforced):
        self._text = text

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        (text,) = texts
        self._text.follow(text[self._text.length :])
        forced = self._text.forced[: min(limits.depths[0], limits.guesses)]
        chances = np.cumprod(np.full(len(forced), CLAIM)).tolist()
        return [GuessTree.chain(forced, probabilities=chances)]
