"""A source of guesses of your own: phrases that you know will come.

    python examples/own_source.py path/or/name

A service that writes the same footers, licences or boilerplate knows them before the model has said them once. Guesses
are verified, so a phrase that the model does not say costs a little time, and changes nothing.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import GuessSource, GuessTree, PoolSource
from lookahead.guessing.source import Limits

PHRASES = ["if __name__ == '__main__':\n    unittest.main()\n", "# Licensed to PSF under a Contributor Agreement.\n"]


class Phrases(GuessSource):
    """Proposes the rest of a phrase once a text ends with its first tokens."""

    def __init__(self, phrases: list[list[int]], begin: int = 2):
        """begin: tokens of a phrase that must be there."""
        self.phrases, self.begin = phrases, begin

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        return [self.rest(text, limits.guesses) for text in texts]

    def rest(self, text: list[int], count: int) -> GuessTree:
        for phrase in self.phrases:
            for known in range(min(len(phrase) - 1, len(text)), self.begin - 1, -1):
                if text[-known:] == phrase[:known]:
                    rest = phrase[known : known + count]
                    return GuessTree.chain(rest, probabilities=[0.9 ** (i + 1) for i in range(len(rest))])
        return GuessTree.empty()


path = sys.argv[1] if len(sys.argv) > 1 else lookahead.DEMO_MODEL
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
phrases = Phrases([tokenizer(phrase, add_special_tokens=False).input_ids for phrase in PHRASES])
lookahead.wrap(model, source=[PoolSource(), phrases])
output = model.generate(**tokenizer("if __name__ ==", return_tensors="pt"), max_new_tokens=60)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(model.lookahead.last)  # "Phrases: asked in ... steps": what it proposed, and what came true
