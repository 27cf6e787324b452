"""Passes over single sequences in one call, for models built like Llama on a CPU (`cpu.decoder`)."""

from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.cpu import decoder, native
from lookahead.cpu.products import Linear
from lookahead.models.adapter import ModelAdapter, context_length
from lookahead.models.cache import LookaheadCache
from lookahead.models.decoder import UnknownDecoderError, read_decoder
from lookahead.passes.runner import EagerRunner, Output
from lookahead.step import Step, grow, pad

# Tokens of a prompt, at most; torch is quicker beyond. With the matrix unit by dtype, and without it.
MOST_READ_IN_TILES = {torch.bfloat16: 192, torch.float32: 512}
MOST_READ = 64 if native.CAPABILITY.startswith("AVX512") else 32
FIRST_POSITIONS = 1024  # of the first table of rotary embeddings
MOST_COPIED = 2**30  # bytes of a copy that takes more than half as much as the weights, unless it is asked for

_known: WeakKeyDictionary[PreTrainedModel, dict[int, Linear]] = WeakKeyDictionary()  # for `decoder.smallest`


class FusedRunner(EagerRunner):
    """Runs steps of single sequences, and their shorter prompts, in one call. Everything else runs eagerly.

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
        in_tiles = all(linear.is_in_tiles(found.embedding.dtype) for linear in (found.head, *found.layers[0][:7]))
        self._most_read = MOST_READ_IN_TILES[found.embedding.dtype] if in_tiles else MOST_READ
        self.weight_bytes = decoder.weight_bytes(found)
        self._vocabulary = len(found.embedding)
        self._rotary: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._serves = range(0)  # the largest position of a pass that takes these
        # The keys of each layer, by its index; the addresses of its keys and values; the bytes of a column; and the
        # numbers from head to head.
        self._buffers: dict[int, tuple[torch.Tensor, int, int, int, int]] = {}

    def run(self, steps: list[Step], cache: LookaheadCache, last: list[int] | None = None) -> Output:
        step = steps[0]
        if len(steps) > 1 or len(step) - step.computed > decoder.MAX_ROWS or not self._takes(step.ids):
            return super().run(steps, cache, last)
        return self._compute(step, cache, last)

    def read(self, new: torch.Tensor, cache: LookaheadCache, chunk_size: int | None = None, keep: int = 1) -> Output:
        count = new.shape[1]
        fits = count <= min(self._most_read, chunk_size or count, context_length(self.model) - cache.lengths[0])
        if new.ndim > 2 or not fits or not self._takes(ids := new[0].cpu().numpy()):
            return super().read(new, cache, chunk_size, keep)
        step = grow(ids.tolist(), range(-1, count - 1), computed=0)
        output = self._compute(step, cache, shown=min(keep, count))
        cache.commit([step], [list(range(count))])
        return Output(output.logits[0], {i: states[0] for i, states in output.hidden_states.items()})

    def _takes(self, ids: np.ndarray) -> bool:
        """Whether a pass can compute these tokens. Otherwise, the model's own code does, or raises an error."""
        tokens = ids.tolist()
        are_known = min(tokens) >= 0 and max(tokens) < self._vocabulary
        return are_known and not torch.is_autocast_enabled("cpu")

    def _compute(
        self, step: Step, cache: LookaheadCache, last: list[int] | None = None, shown: int | None = None
    ) -> Output:
        """Run a step of a single sequence. shown: rows whose logits are returned, the last ones; default: all."""
        ids, positions, ancestors = pad([step], cache.lengths, last)
        rows = ids.shape[1]
        cache.begin(rows, step.computed)
        hidden = self.adapter.hidden(ancestors, positions, cache)
        extended = [self._extended(index, layer, rows) for index, layer in enumerate(cache.layers)]
        logits, outputs, has_nan, likeliest = self._program.run(
            ids[0],
            positions[0],
            self._rotary_of(max(positions[0].tolist())),
            [(keys, values, stride) for keys, values, stride, _ in extended],
            [held for *_, held in extended],
            [(np.ascontiguousarray(hidden[kind][0]), layers) for kind, layers in self.adapter.kinds.items()],
            self._requested,
            shown,
            (0 if shown else 1 + step.guesses - step.computed, *self.likeliest),
        )
        return Output(logits, outputs, has_nan, likeliest)

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

    def _extended(self, index: int, layer: Any, rows: int) -> tuple[int, int, int, int]:
        """Append rows to the `InPlaceLayer` of this index. Return its part of `caches` and `held` in `Program.run`."""
        if not layer.is_initialized:
            empty = self._program.decoder.embedding.new_empty(1, self._program.key_heads, 0, self._program.head_dim)
            layer.lazy_initialization(empty, empty)
        first, seen = layer.extend(rows)
        keys, values = layer.buffers
        held = self._buffers.get(index)
        if held is None or held[0] is not keys:
            column = keys.shape[3] * keys.element_size()
            held = self._buffers[index] = keys, keys.data_ptr(), values.data_ptr(), column, keys.stride(1)
        _, of_keys, of_values, column, stride = held
        return of_keys + first * column, of_values + first * column, stride, seen


def copied_bytes(model: PreTrainedModel) -> int:
    """Bytes of what is kept for the next call."""
    copies = _known.get(model, {}).values()
    return sum(tensor.nbytes for linear in copies for tensor in linear if tensor is not None)


def forget(model: PreTrainedModel) -> None:
    """Free what is kept for the next call."""
    _known.pop(model, None)
