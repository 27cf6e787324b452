"""Passes over single sequences in one call, for models built like Llama on a CPU (`cpu.decoder`)."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.cpu import decoder
from lookahead.models.adapter import ModelAdapter
from lookahead.models.cache import LookaheadCache
from lookahead.models.decoder import UnknownDecoderError, read_decoder
from lookahead.passes.runner import EagerRunner, Output
from lookahead.step import Step, pad

FIRST_POSITIONS = 1024  # of the first table of rotary embeddings


class FusedRunner(EagerRunner):
    """Runs steps of single sequences in one call. Everything else runs eagerly.

    The model is looked at anew for each call of generate(), and its weights are read where they are.
    Raises UnknownDecoderError if the model cannot be run so.
    """

    name = "fused"

    def __init__(self, model: PreTrainedModel, adapter: ModelAdapter, hidden_states: tuple[int, ...] = ()):
        super().__init__(model, adapter, hidden_states)
        if not (adapter.splits_attention and adapter.uses_kernels and adapter.takes_position_ids):
            raise UnknownDecoderError("it does not take our attention or our kernels")
        found = read_decoder(model)
        if not decoder.serves(found):
            raise UnknownDecoderError(
                "its weights are not all in float32, bfloat16 or int8, or their shapes do not fit"
            )
        self._program = decoder.Program(found)
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, steps: list[Step], cache: LookaheadCache, last: list[int] | None = None) -> Output:
        serves = len(steps) == 1 and len(steps[0]) - steps[0].computed <= decoder.MAX_ROWS
        if not serves or torch.is_autocast_enabled("cpu"):
            return super().run(steps, cache, last)
        ids, positions, ancestors = pad(steps, cache.lengths, last)
        if ids.max() >= len(self._program.decoder.embedding):  # the model's own code raises an error
            return super().run(steps, cache, last)
        rows = ids.shape[1]
        cache.begin(rows, steps[0].computed)
        hidden = self.adapter.hidden(ancestors, positions, cache)
        of_one = {visibility: np.ascontiguousarray(found[0]) for visibility, found in hidden.items()}
        logits, outputs = self._program.run(
            ids[0],
            positions[0],
            self._rotary_until(int(positions.max())),
            [self._extended(layer, rows) for layer in cache.layers],
            [of_one[visibility] for visibility in self.adapter.layers if visibility is not None],
            self._requested,
        )
        return Output(logits, outputs)

    def _rotary_until(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the positions up to this one, and some more: [positions, rotary] each."""
        if self._rotary is None or position >= len(self._rotary[0]):
            count = max(FIRST_POSITIONS, 2 * position)
            like = self._program.decoder.embedding.new_empty(1, 1, 1)
            cos, sin = self.model.model.rotary_emb(like, torch.arange(count)[None])  # type: ignore[union-attr, operator]
            self._rotary = cos[0].contiguous(), sin[0].contiguous()
        return self._rotary

    def _extended(self, layer: Any, rows: int) -> tuple[int, int, int, int]:
        """Append rows to an `InPlaceLayer`, and describe it as `decoder.Program.run` wants it."""
        if not layer.is_initialized:
            empty = self._program.decoder.embedding.new_empty(1, self._program.key_heads, 0, self._program.head_dim)
            layer.lazy_initialization(empty, empty)
        first, seen = layer.extend(rows)
        keys, values = layer.buffers
        offset = first * keys.shape[3] * keys.element_size()
        return keys.data_ptr() + offset, values.data_ptr() + offset, seen, keys.stride(1)
