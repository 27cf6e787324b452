"""Passes over single sequences in one call, for models built like Llama on a CPU (`cpu.decoder`)."""

from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.cpu import decoder
from lookahead.cpu.products import Linear
from lookahead.models.adapter import ModelAdapter
from lookahead.models.cache import LookaheadCache
from lookahead.models.decoder import UnknownDecoderError, read_decoder
from lookahead.passes.runner import EagerRunner, Output
from lookahead.step import Step, pad

FIRST_POSITIONS = 1024  # of the first table of rotary embeddings
MOST_COPIED = 2**30  # bytes of a copy that takes more than half as much as the weights, unless it is asked for

_known: WeakKeyDictionary[PreTrainedModel, dict[int, Linear]] = WeakKeyDictionary()  # for `decoder.smallest`


class FusedRunner(EagerRunner):
    """Runs steps of single sequences in one call. Everything else runs eagerly.

    The model is looked at anew for each call of generate(), and its weights are read where they are, or in a copy that
    holds them in fewer bits (`decoder.smallest`), which is kept for the next call. Raises UnknownDecoderError if the
    model cannot be run so.
    """

    name = "fused"

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: ModelAdapter,
        hidden_states: tuple[int, ...] = (),
        packs: bool | Literal["auto"] = False,
    ):
        """packs: `LookaheadConfig.pack_weights`."""
        super().__init__(model, adapter, hidden_states)
        if not (adapter.splits_attention and adapter.uses_kernels and adapter.takes_position_ids):
            raise UnknownDecoderError("it does not take our attention or our kernels")
        found = read_decoder(model)
        if not decoder.serves(found):
            raise UnknownDecoderError(
                "its weights are not all in float32, bfloat16 or int8, or their shapes do not fit"
            )
        self.declined_bytes = 0
        """Bytes, about, of a copy of the weights that was not made because it is large."""
        if packs:
            copied = decoder.indexed_bytes(found)
            is_small = copied <= MOST_COPIED or 2 * copied <= decoder.weight_bytes(found)
            if not (packs is True or is_small):
                self.declined_bytes = copied
            found = decoder.smallest(found, _known.setdefault(model, {}), indexes=not self.declined_bytes)
        else:
            forget(model)
        self._program = decoder.Program(found)
        self.weight_bytes = decoder.weight_bytes(found)
        self._rotary: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._serves = range(0)  # the largest position of a pass that takes these

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
            self._rotary_of(int(positions.max())),
            [self._extended(layer, rows) for layer in cache.layers],
            [of_one[visibility] for visibility in self.adapter.layers if visibility is not None],
            self._requested,
        )
        return Output(logits, outputs)

    def _rotary_of(self, position: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines by name of the rotary embedding: float32 [positions, rotary] each.

        position: the largest of a pass. By it, longrope chooses one of two sets of frequencies for the whole pass.
        """
        if position not in self._serves:
            rotary: Any = self.model.model.rotary_emb
            count = switch = max(FIRST_POSITIONS, 2 * position)
            if rotary.rope_type == "longrope":
                switch = rotary.config.rope_parameters["original_max_position_embeddings"]
            self._serves = range(switch, count) if position >= switch else range(min(switch, count))
            positions = torch.arange(self._serves.stop, device="cpu")[None]
            like = self._program.decoder.embedding.new_empty(1, 1, 1)
            for name in {name or "" for name in self._program.decoder.rotary}:
                cos, sin = rotary(like, positions, *([name] if name else []))
                self._rotary[name] = cos[0].float().contiguous(), sin[0].float().contiguous()
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


def copied_bytes(model: PreTrainedModel) -> int:
    """Bytes of what is kept for the next call."""
    copies = _known.get(model, {}).values()
    return sum(tensor.nbytes for linear in copies for tensor in linear if tensor is not None)


def forget(model: PreTrainedModel) -> None:
    """Free what is kept for the next call."""
    _known.pop(model, None)
