"""Defines the operations of a program in plain torch. Tests compare other executors with it.

CUDA graphs are captured from a subclass of it (`passes.static`), in the model's dtype and over a cache whose rows have
fixed places.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, singledispatchmethod
from typing import NamedTuple

import torch
from torch.nn import functional

from lookahead.cpu import operations as op
from lookahead.cpu.alibi import Alibi
from lookahead.cpu.elementwise import Clip, Scale, Xielu
from lookahead.cpu.experts import Experts, Weigh
from lookahead.cpu.heads import HeadProducts, Join, Select
from lookahead.cpu.products import Format, Linear
from lookahead.cpu.program import Program
from lookahead.cpu.states import Convolve, Delta, DeltaByKey, GatedNorm, Scan
from lookahead.cpu.streams import Blend, Cut, Rescale

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "identity": lambda x: x,
}


class State(NamedTuple):
    """The state of a layer before a pass."""

    inputs: torch.Tensor
    """The last inputs of its convolutions, [channels, columns]."""
    state: torch.Tensor
    """Of its recurrence, [heads, keys, values]; of `Scan`, [heads, values, keys]."""


def _numbers(weight: torch.Tensor, format: Format) -> torch.Tensor:
    """A weight, unpacked if it is in blocks."""
    if not format.is_in_blocks:
        return weight
    from lookahead.cpu.gguf import unpacked  # other weights do not need it

    return unpacked(weight, format)


class Reference:
    """One pass over T rows. It computes in ``wide`` and rounds to the program's dtype where the operations say so.

    Between two roundings, an operation computes at least in float32.
    """

    def __init__(
        self,
        program: Program,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        hidden: Mapping[int, torch.Tensor],
        states: Mapping[int, State] | None = None,
        parents: Sequence[int] | None = None,
        wide: torch.dtype = torch.float32,
        start: int = 0,
    ):
        """ids, positions: int64 [T]. rotary: by name, cosines and sines [positions, rotary] of all positions.

        caches: by layer, keys and values [key heads, held, head size] before this pass. hidden: by layer, which of the
        last keys each row must not see, bool [T, keys]. states: by layer, before this pass. parents: of each row, its
        parent or -1; default: the rows are a chain. start: position of the first key in the caches.
        """
        self.dtype, self.wide, self.start = program.dtype, wide, start
        self.finest = torch.promote_types(wide, torch.float32)
        self.ids, self.positions, self.rotary, self.hidden = ids, positions, rotary, hidden
        self.caches = {layer: (keys.to(wide), values.to(wide)) for layer, (keys, values) in caches.items()}
        self.states = states or {}
        self.parents = range(-1, len(ids) - 1) if parents is None else parents
        self.inputs: dict[int, dict[int, torch.Tensor]] = {}
        """Of the convolutions of a layer, by their first channel."""
        self.recurrent: dict[int, list[torch.Tensor]] = {}
        """The state of a layer after each row."""
        self.rotations: dict[str, tuple[torch.Tensor, ...]] = {}
        """Cosines and sines of the rows, [T, 1, rotary], by the name of their tables."""
        self.values: dict[op.Value, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        """What was kept: [T, hidden] by number."""
        self.logits = torch.empty(0, device="cpu")
        """[T, vocabulary]."""
        last = program.last_reads
        for i, operation in enumerate(program.operations):
            result = self.computed(operation)
            if result is not None:
                (out,) = operation.values_written()
                self.values[out] = result
            for value in operation.values_read():
                if last[value] == i:
                    self.values.pop(value, None)

    def rounded(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """dtype: default: of the program."""
        return x.to(dtype or self.dtype).to(self.wide)

    def states_after(self, path: Sequence[int]) -> dict[int, State]:
        """The states of layers after these rows are committed."""
        found = {}
        for layer, (held, state) in self.states.items():
            inputs = held.to(self.wide)
            if layer in self.inputs:
                new = torch.cat([x for _, x in sorted(self.inputs[layer].items())], dim=1)
                inputs = torch.cat([inputs, new[path].T], dim=1)[:, -held.shape[1] :]
            found[layer] = State(inputs, self.recurrent[layer][path[-1]] if layer in self.recurrent else state)
        return found

    def path_to(self, row: int) -> list[int]:
        """A row's ancestors and itself."""
        return [*(self.path_to(self.parents[row]) if self.parents[row] >= 0 else []), row]

    def heads(self, x: op.Value, size: int) -> torch.Tensor:
        """[T, heads, size]."""
        return self.values[x].unflatten(-1, (-1, size))

    def product(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        weight, scales, bias = _numbers(layer.weight, layer.format).to(self.wide), layer.scales, layer.bias
        if scales is None:
            return self.rounded(functional.linear(x, weight, None if bias is None else bias.to(self.wide)))
        if scales.ndim == 2:  # of groups of inputs
            groups = layer.weight.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
            weight = groups.flatten(1).to(self.dtype).to(self.wide)
        sums = x @ weight.T
        if scales.ndim == 1:
            sums = self.rounded(self.rounded(sums) * scales.to(self.wide))
        return self.rounded(sums if bias is None else sums + bias.to(self.wide))

    def activated(self, x: torch.Tensor, activation: op.Activation, dtype: torch.dtype | None = None) -> torch.Tensor:
        """dtype: of steps of the formula; default: of the program."""
        is_in_steps = activation in ("gelu_new", "gelu_bloom")
        return self.rounded(self.gelu_in_steps(x, activation, dtype) if is_in_steps else ACTIVATIONS[activation](x))

    def gelu_in_steps(self, x: torch.Tensor, activation: op.Activation, dtype: torch.dtype | None) -> torch.Tensor:
        rounded, factor = partial(self.rounded, dtype=dtype), math.sqrt(2 / math.pi)
        if activation == "gelu_bloom":
            z = rounded(rounded(factor * x) * rounded(1 + rounded(rounded(0.044715 * x) * x)))
        else:
            z = rounded(factor * rounded(x + rounded(0.044715 * rounded(rounded(x * x) * x))))
        return rounded(0.5 * x) * rounded(1 + rounded(z.tanh()))

    def clipped(self, both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        rounded = self.rounded
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        return rounded(rounded(up + 1) * rounded(gate * rounded(rounded(gate * alpha).sigmoid())))

    def biases_of(self, attend: Alibi, keys: int) -> torch.Tensor:
        """[heads, T, keys]."""
        rows, biases = self.positions[:, None], torch.from_numpy(attend.biases).to(self.wide)
        cached = self.start + torch.arange(keys - len(rows), device="cpu")
        places = torch.cat([cached, self.positions]).minimum(rows)
        return biases[:, places + (biases.shape[1] - 1 - rows if attend.by_distance else 0)]

    @singledispatchmethod
    def computed(self, operation: op.Operation) -> torch.Tensor | None:
        raise NotImplementedError(type(operation).__name__)

    @computed.register
    def _(self, embed: op.Embed) -> torch.Tensor:
        x = _numbers(embed.weight[self.ids], embed.format).to(self.wide)
        x = x if embed.factor == 1 else self.rounded(x * embed.factor)
        if embed.of_positions is None:
            return x
        return self.rounded(x + embed.of_positions[embed.offset + self.positions].to(self.wide))

    @computed.register
    def _(self, norm: op.Norm) -> torch.Tensor:
        x, weight = self.heads(norm.x, norm.size), norm.weight
        if norm.is_centered:
            bias = None if norm.bias is None else norm.bias.to(self.wide)
            weight = None if weight is None else weight.to(self.wide)
            weight = weight if weight is None or not norm.offset else self.rounded(weight + norm.offset)
            return self.rounded(functional.layer_norm(x, (norm.size,), weight, bias, norm.epsilon).flatten(1))
        x = x.to(self.finest)
        x = x * (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        x = x if norm.rounds_once else self.rounded(x)
        x = x if weight is None else x * (weight.to(x.dtype) + norm.offset if norm.offset else weight.to(x.dtype))
        return self.rounded(x.flatten(1))

    @computed.register
    def _(self, norm: GatedNorm) -> torch.Tensor:
        x, gate = (self.heads(value, norm.size).to(self.finest) for value in (norm.x, norm.gate))
        factors = functional.silu(gate)
        x = x if norm.gates_after else x * factors
        x = x * (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        x = x if norm.rounds_once else self.rounded(x)
        x = x if norm.weight is None else x * norm.weight.unflatten(0, (-1, norm.size)).to(x.dtype)
        return self.rounded((x * factors if norm.gates_after else x).flatten(1))

    @computed.register
    def _(self, products: op.Products) -> None:
        for linear, out in zip(products.layers, products.outs, strict=True):
            self.values[out] = self.product(linear, self.values[products.x])

    @computed.register
    def _(self, select: Select) -> torch.Tensor:
        groups = self.heads(select.x, select.size).unflatten(1, (-1, select.group))
        taken = groups[:, :, select.first : select.first + select.taken]
        return taken.repeat_interleave(select.repeats, dim=2).flatten(1)

    @computed.register
    def _(self, products: HeadProducts) -> torch.Tensor:
        x = self.values[products.x].unflatten(-1, (products.heads, -1))
        of_heads = products.weight.to(self.wide).unflatten(0, (products.heads, -1))
        weight = of_heads[:, products.first : products.first + products.taken]
        equation = "rhn,hnw->rhw" if products.is_transposed else "rhw,hnw->rhn"
        return self.rounded(torch.einsum(equation, x, weight).flatten(1))

    @computed.register
    def _(self, join: Join) -> torch.Tensor:
        parts = [self.values[x].unflatten(-1, (join.heads, -1)) for x in (join.x, join.more)]
        return torch.cat(parts, dim=-1).flatten(1)

    @computed.register
    def _(self, rotary: op.Rotary) -> torch.Tensor:
        if rotary.name not in self.rotations:
            tables = self.rotary[rotary.name]
            self.rotations[rotary.name] = tuple(table[self.positions].to(self.wide)[:, None] for table in tables)
        x, (cos, sin) = self.heads(rotary.x, rotary.size), self.rotations[rotary.name]
        x = x.to(self.finest) if rotary.rounds_once else x
        part, rest = x.split([cos.shape[-1], rotary.size - cos.shape[-1]], dim=-1)
        if rotary.is_interleaved:
            part = torch.cat([part[..., ::2], part[..., 1::2]], dim=-1)
        first, second = part.chunk(2, dim=-1)
        along, across = part * cos, torch.cat([-second, first], dim=-1) * sin
        rotated = along + across if rotary.rounds_once else self.rounded(along) + self.rounded(across)
        if rotary.is_interleaved and not rotary.separates:
            rotated = torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(2)
        rotated = torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
        return self.rounded(rotated.flatten(1))

    @computed.register
    def _(self, append: op.Append) -> None:
        pairs = (append.keys, append.size), (append.values, append.value_size)
        new = [self.heads(x, size).transpose(0, 1) for x, size in pairs]
        keys, values = (torch.cat(parts, dim=1) for parts in zip(self.caches[append.layer], new, strict=True))
        self.caches[append.layer] = keys, values

    @computed.register
    def _(self, attend: op.Attend) -> torch.Tensor:
        queries, hidden = self.heads(attend.x, attend.size).transpose(0, 1), self.hidden[attend.layer]
        groups = len(queries) // attend.key_heads
        keys, values = (states.repeat_interleave(groups, dim=0) for states in self.caches[attend.layer])
        if attend.is_latent:
            keys, values = torch.cat([keys, values], dim=-1), keys
        scores = (queries @ keys.mT).to(self.finest) * attend.scaling
        if isinstance(attend, Alibi):
            scores = scores + self.biases_of(attend, scores.shape[-1])
            scores = self.rounded(scores) if attend.rounds_scores else scores
        if attend.cap:
            scores = (scores / attend.cap).tanh() * attend.cap
        scores[..., scores.shape[-1] - hidden.shape[1] :].masked_fill_(hidden, -math.inf)
        if attend.sinks is not None:
            sinks = attend.sinks.to(self.finest)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]].to(self.wide)
        return self.rounded((weights @ values).transpose(0, 1).flatten(1))

    @computed.register
    def _(self, convolve: Convolve) -> torch.Tensor:
        x, weight, width = self.values[convolve.x], convolve.weight.to(self.wide), convolve.x.width
        self.inputs.setdefault(convolve.layer, {})[convolve.first] = x
        held = self.states[convolve.layer].inputs[convolve.first : convolve.first + width].to(self.wide)
        sums = torch.zeros_like(x) if convolve.bias is None else convolve.bias.to(self.wide).repeat(len(x), 1)
        for row in range(len(x)):
            before = torch.cat([held, x[self.path_to(row)].T], dim=1)[:, -convolve.taps :]
            sums[row] += (before * weight).sum(1)
        dtype = convolve.weight.dtype
        return self.activated(self.rounded(sums, dtype), convolve.activation, dtype)

    @computed.register
    def _(self, delta: Delta) -> torch.Tensor:
        groups, states = delta.heads // delta.key_heads, list[torch.Tensor]()
        q, k = (self.heads(x, delta.size) for x in (delta.x, delta.keys))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(groups, dim=1)[..., None] for x in (q / delta.size**0.5, k))
        v = self.heads(delta.values, delta.value_size)[..., None, :]
        biases = delta.biases.to(self.wide).unflatten(0, (delta.heads, -1))
        x = self.heads(delta.decays, delta.decay_size) + biases
        speeds = delta.log_speeds.to(self.wide).exp()[:, None]
        if isinstance(delta, DeltaByKey):
            times = (1 + x.exp()).float().to(self.wide).log()
            logs = self.rounded(delta.limit * (speeds * x).sigmoid()) if delta.limit else -speeds * times
        else:
            logs = -speeds * functional.softplus(x)
        decays = logs.exp()[..., None]
        rates = delta.factor * self.rounded(self.values[delta.rates].sigmoid())[..., None, None]
        for row, parent in enumerate(self.parents):
            before = states[parent] if parent >= 0 else self.states[delta.layer].state.to(self.wide)
            decayed = decays[row] * before
            states.append(decayed + k[row] * rates[row] * (v[row] - (decayed * k[row]).sum(1, keepdim=True)))
        self.recurrent[delta.layer] = states
        return self.rounded((torch.stack(states) * q).sum(2).flatten(1))

    @computed.register
    def _(self, scan: Scan) -> torch.Tensor:
        groups, states, rounded = scan.heads // scan.key_heads, list[torch.Tensor](), self.rounded
        q, k = (self.heads(x, scan.size).repeat_interleave(groups, dim=1) for x in (scan.x, scan.keys))
        v = self.heads(scan.values, scan.value_size)
        times = rounded(functional.softplus(rounded(self.values[scan.times] + scan.biases.to(self.wide))))[..., None]
        decays, k = (-scan.log_speeds.to(self.wide).exp()[:, None] * times).exp(), rounded(times * k)
        for row, parent in enumerate(self.parents):
            before = states[parent] if parent >= 0 else self.states[scan.layer].state.to(self.wide)
            states.append(decays[row, ..., None] * before + v[row][..., None] * k[row][:, None])
        self.recurrent[scan.layer] = states
        found = rounded((torch.stack(states) @ q[..., None])[..., 0])
        return rounded(found + rounded(scan.skips.to(self.wide)[:, None] * v)).flatten(1)

    @computed.register
    def _(self, gate: op.Gate) -> torch.Tensor:
        x = self.values[gate.x]
        if gate.rounds_once and gate.by is not None:
            return self.rounded(ACTIVATIONS[gate.activation](x.to(self.finest)) * self.values[gate.by])
        x = self.activated(x, gate.activation)
        return x if gate.by is None else self.rounded(x * self.values[gate.by])

    @computed.register
    def _(self, clip: Clip) -> torch.Tensor:
        return self.rounded(self.values[clip.x].clamp(-clip.limit, clip.limit))

    @computed.register
    def _(self, xielu: Xielu) -> torch.Tensor:
        x, rounded = self.values[xielu.x], self.rounded
        positive = rounded(rounded(xielu.positive * x) * x)
        negative = rounded(xielu.negative * rounded(rounded(x.clamp(max=xielu.least).expm1()) - x))
        return rounded(torch.where(x > 0, positive, negative) + rounded(xielu.beta * x))

    @computed.register
    def _(self, experts: Experts) -> torch.Tensor:
        routed, router = self.values[experts.routed or experts.x], experts.router
        if router is None:
            scores = self.product(experts.layers[0], routed).to(self.finest)
        else:
            scores = routed.to(self.finest) @ router.to(self.finest).T
        scores = (scores / experts.cap).tanh() * experts.cap if experts.cap else scores
        stepped: Callable = self.rounded if experts.rounds_steps else lambda weights: weights
        if experts.nearness >= 0:
            return self.mixed(experts, *self.chosen_in_turn(experts, scores, stepped))
        weights = stepped(scores.sigmoid() if experts.is_sigmoid else scores.softmax(-1))
        ranks = scores if experts.ranks_scores else weights
        ranks = ranks if experts.correction is None else ranks + experts.correction.to(self.finest)
        ranks = self.rounded(ranks) if experts.rounds_ranks else ranks
        if experts.groups > 1:
            groups = ranks.unflatten(1, (experts.groups, -1))
            best = groups.topk(experts.best_of_group).values.sum(-1).topk(experts.top_groups).indices
            is_left = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
            ranks = groups.masked_fill(~is_left[..., None], -math.inf).flatten(1)
        chosen = ranks.topk(experts.top_k).indices
        weights = weights.gather(1, chosen)
        if experts.adds_to_one:
            weights = stepped(weights / stepped(stepped(weights.sum(-1, keepdim=True)) + experts.epsilon))
        weights = stepped(weights * experts.factor)
        weights = weights if experts.scales is None else weights * experts.scales.to(self.finest)[chosen]
        return self.mixed(experts, chosen, self.rounded(weights) if experts.rounds_weights else weights)

    def chosen_in_turn(
        self, experts: Experts, scores: torch.Tensor, stepped: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left, chosen, weights = scores, list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(experts.top_k):
            most, best = left.max(-1, keepdim=True)
            distances = stepped(stepped(most - scores) / torch.maximum(scores.abs(), most))
            near = left.masked_fill(distances > experts.nearness, -math.inf)
            weights.append(stepped(near.softmax(-1).gather(1, best)))
            chosen.append(best)
            left = left.scatter(1, best, -math.inf)
        return torch.cat(chosen, 1), torch.cat(weights, 1)

    def within(self, experts: Experts, both: torch.Tensor) -> torch.Tensor:
        """What the last layer of an expert takes, from what those before it give."""
        if experts.limit:
            return self.clipped(both, experts.alpha, experts.limit)
        if not experts.is_gated:
            return self.activated(both, experts.activation)
        gate, up = both.chunk(2, dim=-1)
        return self.rounded(self.activated(gate, experts.activation) * up)

    def mixed(self, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x, of = self.values[experts.x], experts.experts
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            if expert >= experts.count - experts.identities:
                out[row] = self.rounded(out[row] + self.rounded(x[row] * weights[row, place, None]))
                continue
            *into, back = of[experts.each * expert : experts.each * (expert + 1)]
            taken, given = experts.weighed(x[row], weights[row, place, None])
            both = torch.cat([self.product(linear, self.rounded(taken)) for linear in into], dim=-1)
            out[row] = self.rounded(out[row] + self.rounded(self.product(back, self.within(experts, both)) * given))
        return out

    @computed.register
    def _(self, weigh: Weigh) -> torch.Tensor:
        return self.rounded(self.rounded(self.values[weigh.by].sigmoid()) * self.values[weigh.x])

    @computed.register
    def _(self, scale: Scale) -> torch.Tensor:
        factor = scale.factor if scale.weight is None else scale.factor * scale.weight.to(self.wide)
        return self.rounded(factor * self.values[scale.x])

    @computed.register
    def _(self, add: op.Add) -> torch.Tensor:
        more = self.values[add.more]
        return self.rounded(self.values[add.x] + (more if add.factor == 1 else self.rounded(more * add.factor)))

    @computed.register
    def _(self, blend: Blend) -> torch.Tensor:
        x, more = (self.values[value].unflatten(1, (-1, blend.size)) for value in (blend.x, blend.more))
        factors = x.new_zeros(len(x), x.shape[1] * more.shape[1])
        if blend.by is not None and blend.weight is not None:
            factors = self.rounded(self.values[blend.by] @ blend.weight.to(self.wide).T)
        factors = self.rounded(factors + blend.offset).unflatten(1, (-1, more.shape[1]))
        sums = self.rounded(factors @ more)
        sums[:, : blend.first] = 0
        return self.rounded(x + sums).flatten(1)

    @computed.register
    def _(self, rescale: Rescale) -> torch.Tensor:
        x, rounded = self.values[rescale.x], self.rounded
        squares, squares_of_like = (rounded(rounded(y * y).mean(1, True)) for y in (x, self.values[rescale.like]))
        size = rounded(squares.clamp(min=rescale.limit).sqrt())
        return rounded(rounded(x * rounded(squares_of_like.sqrt())) / size)

    @computed.register
    def _(self, cut: Cut) -> torch.Tensor:
        x, rounded = self.values[cut.x], self.rounded
        deviation = rounded(x.to(self.finest).std(1, correction=0, keepdim=True))
        edge = rounded(rounded(x.mean(1, True)) + rounded(deviation * cut.factor))
        return rounded(x - edge).relu()

    @computed.register
    def _(self, keep: op.Keep) -> None:
        self.outputs[keep.index] = self.values[keep.x]

    @computed.register
    def _(self, logits: op.Logits) -> None:
        x = self.product(logits.linear, self.values[logits.x])
        x = x if logits.divisor == 1 else self.rounded(x / logits.divisor)
        x = x if logits.factor == 1 else self.rounded(x * logits.factor)
        if logits.cap:
            x = self.rounded(self.rounded(self.rounded(x / logits.cap).tanh()) * logits.cap)
        self.logits = x
