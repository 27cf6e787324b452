"""Trees over states: a step's rows in layers that keep a state, without a state for each row.

Such a layer is a linear recurrence, so what a row sees has a closed form: the committed state, decayed along the row's
ancestors, and its ancestors' own updates. The state is read once for all rows.

    gated delta rule        S_t = exp(g_t) S_p + k_t u_t^T      u_t = b_t (v_t - exp(g_t) S_p^T k_t)
    Mamba-2                 S_t = exp(g_t) S_p + k_t u_t^T      u_t, k_t: input, and its B by the size of the time step
    both                    o_t = S_t^T q_t                     p: the parent of t

    S_t = exp(G_t) S + sum over t and its ancestors j of exp(G_t - G_j) k_j u_j^T     G_t: sum of g on the path to t

A row's updates depend on its ancestors' in the delta rule, which is a triangular system of T rows (DeltaNet's chunks,
Yang et al. 2024, arXiv 2406.06484, and 2412.06464 with gates, with ancestors in the place of the triangle). In Mamba-2
they do not (state space duality, Dao & Gu 2024, arXiv 2405.21060). A short convolution sees the inputs of a row's
ancestors, then those that are committed.

`convolve`, `delta_rule` and `scan` take and return what the functions of transformers do in whose place they stand
(`branching`). Of its two forms they follow the one for single tokens. The state stays as it is until
`StateLayer.commit` applies the accepted path to it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from lookahead.decoding_pass import current_pass
from lookahead.models.cache import InPlaceLayer, KeepsState
from lookahead.step import to_device

_LEAST = -1e5  # A smaller logarithm of a decay is that of zero, too. Differences of infinities are no numbers.


class Forest:
    """What the rows of a pass see of each other, for layers that keep a state."""

    layer: Any
    """The layer of the cache whose states the model is about to update."""

    def __init__(self, ancestors: np.ndarray, device: torch.device):
        """ancestors: bool [batch, T, T], as `pad` returns them."""
        self.rows = ancestors.shape[1]
        self.seen = to_device(ancestors, device)[:, None]
        """bool [batch, 1, T, T]: which rows each of them sees."""
        proper = ancestors & ~np.eye(self.rows, dtype=bool)
        self._parents = np.where(proper, np.arange(self.rows), -1).max(2)
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    def windows(self, width: int, held: int) -> torch.Tensor:
        """Return the columns that each row and those before it on its path stand in: int64 [batch, T, width].

        held: committed columns, which come before the rows.
        """
        if (width, held) not in self._windows:
            rows = np.broadcast_to(np.arange(self.rows), self._parents.shape)
            found = [rows]
            for _ in range(width - 1):
                before = np.take_along_axis(self._parents, np.maximum(rows, 0), axis=1)
                rows = np.where(rows < 0, rows - 1, before)  # -1 is the last committed column
                found.append(rows)
            columns = held + np.stack(found[::-1], axis=2)
            self._windows[width, held] = to_device(columns, self.seen.device)
        return self._windows[width, held]


class _Pending(Protocol):
    def apply(self, paths: list[list[int]]) -> None:
        """Apply rows ``paths[b]`` of each sequence b to the state, in place."""
        ...


class _Inputs(NamedTuple):
    """Inputs of a short convolution."""

    state: torch.Tensor
    """The last committed ones, [batch, channels, kept]."""
    rows: torch.Tensor
    """[batch, channels, T]"""

    def apply(self, paths: list[list[int]]) -> None:
        for state, rows, path in zip(self.state, self.rows, paths, strict=True):
            if path:
                state.copy_(torch.cat([state, rows[:, path]], dim=1)[:, -state.shape[1] :])


class _Updates(NamedTuple):
    """Updates of a recurrence."""

    state: torch.Tensor
    """[batch, heads, keys, values]"""
    keys: torch.Tensor
    """[batch, heads, T, keys], float32."""
    values: torch.Tensor
    """[batch, heads, T, values], float32."""
    decays: torch.Tensor
    """Sums of logarithms along each row's path, [batch, heads, T, keys or 1]."""

    def apply(self, paths: list[list[int]]) -> None:
        for b, path in enumerate(paths):
            if path:
                decays = self.decays[b][:, path]
                keys = self.keys[b][:, path] * (decays[:, -1:] - decays).exp().float()
                kept = self.state[b] * decays[:, -1, :, None].exp().float()
                self.state[b].copy_(kept + keys.mT @ self.values[b][:, path])


class StateLayer(KeepsState, LinearAttentionLayer):
    """The states of a layer, as transformers keeps them. In a step with branches, they wait for `commit`."""

    def __init__(self, number_of_states: int = 1):
        self.number_of_states = number_of_states
        self.reset()

    def reset(self) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, self.number_of_states)
        self.pending: list[_Pending] = []
        """What the rows of the last pass do to the states."""

    def update_conv_state(  # type: ignore[override]  # passes on what else there is
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As transformers' layer. In a step: return what is held and the rows, [batch, channels, kept + T]."""
        forest = _forest_if_any()
        if forest is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        forest.layer = self
        held: torch.Tensor = self.conv_states[state_idx]  # type: ignore[assignment]  # the prompt was computed
        self.pending.append(_Inputs(held, conv_states))
        return torch.cat([held, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """As transformers' layer. In a step, `delta_rule` or `scan` has kept what `commit` needs."""
        if _forest_if_any() is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return recurrent_states

    def commit(self, paths: list[list[int]]) -> None:
        """Apply rows ``paths[b]`` of each sequence b to the states: a path from the root. A single row is applied
        already.
        """
        for pending in self.pending:
            pending.apply(paths)
        self.pending = []

    def tensors(self) -> list[torch.Tensor]:
        """Return its states."""
        return [x for states in (self.conv_states, self.recurrent_states) for x in states.values() if x is not None]

    def initialize(self, inputs: torch.Tensor, state: torch.Tensor | None) -> None:
        """Hold zeros, as before any token, like the inputs of a convolution, [1, channels, columns], and the state of a
        recurrence, [1, heads, keys, values].
        """
        self.lazy_initialization(conv_states=inputs, recurrent_states=state)
        self.has_previous_state[0] = True

    def copy_from(self, theirs: LinearAttentionLayer) -> None:
        """Hold copies of the states of a layer of transformers'."""
        for name in vars(LinearAttentionLayer()):
            value = getattr(theirs, name)
            if isinstance(value, dict):
                value = {i: x.clone() if isinstance(x, torch.Tensor) else x for i, x in value.items()}
            setattr(self, name, value)

    def stack(self, layers: list["StateLayer"], offsets: list[int] | None = None) -> None:
        """Become the batch of ``layers``. offsets: as for `InPlaceLayer.stack`; a state has no columns."""
        self.copy_from(layers[0])
        self._replace(lambda name, i, _: torch.cat([getattr(layer, name)[i] for layer in layers]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these sequences of the batch, in this order."""
        self._replace(lambda _name, _i, states: states.index_select(0, indices.to(states.device)))

    def _replace(self, replaced: Callable[[str, int, torch.Tensor], torch.Tensor]) -> None:
        """Hold other states, in dicts of this layer's own: a copy of a layer shares those of the layer."""
        for name in ("conv_states", "recurrent_states"):
            states = getattr(self, name).items()
            setattr(self, name, {i: None if held is None else replaced(name, i, held) for i, held in states})

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = next((len(x) for x in self.conv_states.values() if x is not None), 0)
        self.batch_select_indices(torch.arange(batch, device="cpu").repeat_interleave(repeats))


class StateAndKeysLayer(StateLayer, InPlaceLayer):  # type: ignore[misc, override]  # as transformers mixes them
    """States, and keys and values of all positions."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1, expected_length: int = 0):
        self.number_of_states = number_of_states
        InPlaceLayer.__init__(self, expected_length)  # calls reset

    def reset(self) -> None:
        StateLayer.reset(self)
        InPlaceLayer.reset(self)

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        if keys_and_values:
            InPlaceLayer.lazy_initialization(self, *keys_and_values)
        else:
            StateLayer.lazy_initialization(self, **states)

    def stack(self, layers: Any, offsets: list[int] | None = None) -> None:
        StateLayer.stack(self, layers)
        if layers[0].is_initialized:
            InPlaceLayer.stack(self, layers, offsets)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        StateLayer.batch_select_indices(self, indices)
        InPlaceLayer.batch_select_indices(self, indices)


def convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve the rows of a step, as transformers' ``causal_conv1d_fn``.

    hidden_states: [batch, channels, kept + T] (`StateLayer.update_conv_state`). weight: [channels, width].
    Returns [batch, channels, T].
    """
    forest = _forest()
    channels, held = hidden_states.shape[1], hidden_states.shape[2] - forest.rows
    columns = forest.windows(weight.shape[1], held)
    gathered = hidden_states.to(weight.dtype).gather(2, columns.flatten(1)[:, None].expand(-1, channels, -1))
    windows = gathered.unflatten(2, (forest.rows, weight.shape[1]))
    out = (windows.float() * weight[:, None].float()).sum(-1)  # rounded once, as in a convolution
    if bias is not None:
        out = out + bias[:, None].float()
    out = out.to(weight.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rows of a step by the gated delta rule, as transformers' ``torch_chunk_gated_delta_rule``.

    query, key: [batch, T, key heads, keys]. value: [batch, T, heads, values]. beta: [batch, T, heads].
    g: logarithms of decays, [batch, T, heads], or [batch, T, heads, keys] as in ``chunk_kimi_delta_attention``.
    initial_state: [batch, heads, keys, values].
    Returns [batch, T, heads, values], and the state as it was.
    """
    groups = value.shape[2] // key.shape[2]
    q, k, v, beta = (x.transpose(1, 2).float() for x in (query, key, value, beta[..., None]))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(groups, 1) for x in (q / q.shape[-1] ** 0.5, k))
    decays, between = _along_paths((g[..., None] if g.ndim == 3 else g).transpose(1, 2))
    rows, read = k.shape[2], _read(initial_state, decays, k, q)
    system = (beta * _scores(k, k, between)).tril(-1)  # parents stand before their children
    updates = torch.linalg.solve_triangular(system, beta * (v - read[:, :, :rows]), upper=False, unitriangular=True)
    out = read[:, :, rows:] + _scores(q, k, between) @ updates
    _keep(_Updates(initial_state, k, updates, decays))
    return out.transpose(1, 2).to(query.dtype).contiguous(), initial_state


def scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the rows of a step in a Mamba-2 layer, as transformers' ``mamba2_chunk_scan``.

    hidden_states: [batch, T, heads, values]. dt: [batch, T, heads]. A: [heads]. B, C: [batch, T, groups, keys].
    initial_states: [batch, heads, values, keys].
    Returns [batch, T, heads, values], and the state as it was. The limits of time steps are for several tokens: with
    single ones, transformers has none.
    """
    assert initial_states is not None
    groups = hidden_states.shape[2] // B.shape[2]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    k = dt[..., None] * B.repeat_interleave(groups, 2)  # rounded, as for single tokens
    k, q, x = (rows.transpose(1, 2).float() for rows in (k, C.repeat_interleave(groups, 2), hidden_states))
    decays, between = _along_paths((dt.float() * A.float())[..., None].transpose(1, 2))
    state = initial_states.mT
    out = _read(state, decays, q) + _scores(q, k, between) @ x
    _keep(_Updates(state, k, x, decays))
    out = out.transpose(1, 2).to(hidden_states.dtype)
    if D is not None:
        out = (out + hidden_states * D[:, None]).to(out.dtype)
    return out.contiguous(), initial_states


def _along_paths(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the logarithms of decays along the paths to the rows of a step.

    g: [batch, heads, T, channels]. Returns the sums, and [batch, heads, T, T, channels], float32: how much of each
    ancestor's update a row sees. Of other branches' it sees nothing: their decays would overflow.
    """
    seen = _forest().seen[..., None]
    # Sums grow with the path, and their differences must still be exact.
    g = g.to(torch.float64 if g.device.type != "mps" else torch.float32).clamp(min=_LEAST)
    sums = torch.where(seen, g[:, :, None], 0).sum(3)
    between = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~seen, -torch.inf)
    return sums, between.float().exp()


def _scores(a: torch.Tensor, b: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Products of rows a and b, [batch, heads, T, keys] each, decayed by ``between``: [batch, heads, T, T]."""
    if between.shape[-1] == 1:
        return (a @ b.mT) * between[..., 0]
    return torch.einsum("...tc,...tjc,...jc->...tj", a, between, b)


def _read(state: torch.Tensor, decays: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """What each of these rows, [batch, heads, T, keys], reads of the decayed state, one after the other."""
    faded = decays.exp().float()
    return torch.cat([x * faded for x in rows], dim=2) @ state.float()


def _keep(updates: _Updates) -> None:
    _forest().layer.pending.append(updates)


def _forest_if_any() -> Forest | None:
    decoding = current_pass()
    return None if decoding is None else decoding.forest


def _forest() -> Forest:
    forest = _forest_if_any()
    assert forest is not None
    return forest
