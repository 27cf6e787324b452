"""Guesses from a checkpoint's own multi-token-prediction layers, which were trained together with the model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5, Qwen3-Next, Qwen3.5 and others publish one or several decoder
layers after the model's. Layer d joins a state of the previous token with a token, and predicts the token d + 2 places
after that state's:

    S[0] of token j  =  layer 0 (the model's last state of token j - 1, token j)
    S[d] of token j  =  layer d (S[d - 1] of token j - 1, token j)

The state S[m] of a guess at depth m below the root predicts its successor. Deeper guesses use the last layer and its
own states, as an EAGLE head uses its own features.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lookahead.extending import (
    InPlaceLayer,
    LookaheadCache,
    copy_of_cache,
    mtp_logits,
    mtp_model,
    rewind,
    run_mtp_layer,
)
from lookahead.sources.checkpoint import depth_of, projection_of
from lookahead.sources.eagle import EagleSource, Text


@dataclass
class _Kept:
    """The cache of the layers for one text, and after it for guesses."""

    cache: LookaheadCache
    """With one layer for each multi-token-prediction layer."""
    positions: torch.Tensor
    """Int64 [places]"""
    last: torch.Tensor | None = None
    """[layers, hidden]: the layers' states of the text's last token; None before the first."""

    def fork(self) -> "_Kept":
        """An independent copy."""
        return _Kept(copy_of_cache(self.cache), self.positions, self.last)


class _Layers:
    """The layers, used like an EAGLE head. Their features are the S of a token, [n, layers, hidden]."""

    tokens = reads = None  # the vocabulary is the model's

    def __init__(self, model: PreTrainedModel, path: str):
        self._projection = projection_of(model)
        self.device = self._projection.weight.device
        try:
            self._model = mtp_model(model, path)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a damaged checkpoint may raise anything
            raise ValueError(
                f"{path} has no multi-token-prediction layers that fit {type(model).__name__}: {error}"
            ) from error
        config = self._model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(self._model.layers)
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            kinds = ", ".join(sorted(unknown))
            raise ValueError(f"lookahead does not support multi-token-prediction layers of {kinds}")
        self._kinds, self._window = kinds, getattr(config, "sliding_window", None) or 0
        self.layers = (depth_of(model),)
        try:
            self._try()
        except Exception as error:  # layers may raise anything if they need more inputs
            raise ValueError(
                f"lookahead does not support the multi-token-prediction layers of {type(model).__name__}: {error!r}"
            ) from error

    @torch.inference_mode()
    def _try(self) -> None:
        """Compute two tokens of a text, and a guess, to see whether the layers need other inputs."""
        text, positions = self.new_text(), torch.arange(1, 4, device=self.device)
        sees = torch.ones(3, 3, dtype=torch.bool, device=self.device).tril()
        features = torch.zeros(2, self._model.config.hidden_size, dtype=self._model.dtype, device=self.device)
        states = self.compute(text, 0, [0, 0], features, positions[:2], sees[:2, :2], [0, 0])
        self.logits(self.compute(text, 2, [0], states[1:], positions[2:], sees[2:], [1]), [1])

    def new_text(self) -> Text:
        layers = [InPlaceLayer() for _ in self._model.layers]
        return Text(_Kept(LookaheadCache(layers), torch.zeros(0, dtype=torch.int64, device=self.device)))

    def features(self, hidden_states: dict[int, torch.Tensor], rows: slice | list[int]) -> torch.Tensor:
        """The model's last states at these rows, [n, hidden]."""
        return hidden_states[self.layers[0]][rows].to(self.device, self._model.dtype)

    def compute(
        self, text: Text, start: int, tokens: list[int], features: torch.Tensor, positions: torch.Tensor,
        sees: torch.Tensor, depths: list[int],
    ) -> torch.Tensor:  # fmt: skip
        """Compute tokens, write them to the cache from place ``start`` on, and return their S.

        features: for tokens of the text, the model's last states of the tokens before, [n, hidden]; for guesses, the S
        of their parents. sees: bool [n, start + n], the places that each token sees. depths: the tokens' distances from
        the root, 0 in the text.
        """
        cached, count = text.cached, len(self._model.layers)
        rewind(cached.cache, start)
        cached.positions = torch.cat([cached.positions[:start], positions])
        said = self._model.embed_tokens(torch.tensor(tokens, device=self.device)).to(features)
        made: list[torch.Tensor] = []
        for d in range(count):
            if features.ndim == 3:
                # For guesses deeper than the number of layers, the last layer continues with its own states.
                deep = torch.tensor(depths, device=self.device) >= count
                entering = features[:, max(d - 1, 0)]
                if d == count - 1:
                    entering = torch.where(deep[:, None], features[:, d], entering)
            elif d == 0:
                entering = features
            else:
                before = features[0] if cached.last is None else cached.last[d - 1]
                entering = torch.cat([before[None], made[-1][:-1]])
            near = sees
            if self._kinds[d] == "sliding_attention":
                near = sees & (cached.positions[None] > positions[:, None] - self._window)
            made.append(run_mtp_layer(self._model, d, said, entering, positions, near, cached.cache))
        states = torch.stack(made, 1)
        if features.ndim == 2:
            cached.last = states[-1]
        return states

    def logits(self, states: torch.Tensor, depths: list[int]) -> torch.Tensor:
        """[n, vocabulary]"""
        layers = torch.tensor(depths, device=self.device).clamp(max=states.shape[1] - 1)
        chosen = states[torch.arange(len(states), device=self.device), layers]
        return mtp_logits(self._model, chosen.to(self._projection.weight.dtype))  # the model may have changed its dtype


class MtpSource(EagleSource):
    """Proposes a tree that a checkpoint's multi-token-prediction layers grow best-first, as `EagleSource` does."""

    def __init__(self, model: PreTrainedModel, path: str | Path | None = None):
        """model: the layers use its device and dtype.

        path: folder or name of the checkpoint; by default, the one that the model was loaded from.
        Raises ValueError if the checkpoint has no such layers, naming the tensors, or unsupported ones.
        """
        path = path or model.name_or_path
        if not path:
            raise ValueError(f"this {type(model).__name__} was loaded from no checkpoint: give the path of one")
        self._draft_with(model, _Layers(model, str(path)))
