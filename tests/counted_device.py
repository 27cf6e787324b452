"""A device that computes on the CPU, and counts waits and transfers that a GPU would have.

torch lets a backend be written in Python. Each tensor of this one holds a tensor on the CPU, where its operations run.
It is told apart from the CPU as a GPU is: what goes there must be copied, and what comes back must be waited for.
"""

import json
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, compat
from lookahead.passes import probe, static
from lookahead.passes.graphs import StepGraphs

compat.modes_of_users = lambda: []  # `MakingTensors` does what torch does in C++ for a GPU
aten = torch.ops.aten
# Their result, or its size, depends on the content, so the host must know it.
WAITING = {aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2, aten.equal, aten.repeat_interleave}

counts: Counter[str] = Counter()
"""So far: kernels, copies "to device" and "to host", and "waits", in which the host stands still until the device has
done all its work.

A copy to the host is a wait. So is one to the device, unless it is non_blocking."""


class Counted(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("counted", 0), requires_grad=False,
        )  # fmt: skip
        wrapper.inner = inner
        return wrapper

    def __init__(self, inner: torch.Tensor):
        pass

    def tolist(self) -> list:
        return self.cpu().tolist()  # as torch does for a GPU; it refuses a subclass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, *args, **(kwargs or {}))


def run(func, *args, **kwargs):
    """Run an operation that has a tensor on the device among its arguments, or makes one."""
    packet = func.overloadpacket
    device, there = kwargs.get("device"), tree_any(lambda x: isinstance(x, Counted), (args, kwargs))
    goes_there = device is not None and torch.device(device).type == "counted"
    if packet in (aten._to_copy, aten.copy_):
        target, source = args[0], args[packet is aten.copy_]
        there = (isinstance(target, Counted) and device is None) or goes_there
        if there and not isinstance(source, Counted):
            counts["to device"] += 1
            counts["waits"] += not (kwargs.get("non_blocking") or (*args, None, None)[2])
        elif not there and isinstance(source, Counted):
            counts.update(["to host", "waits"])
    elif packet is aten._local_scalar_dense:
        counts.update(["to host", "waits"])
    elif packet in WAITING:
        counts["waits"] += 1
    elif packet in (aten.index, aten.index_put_):
        places = [x for x in args[1] if x is not None]
        counts["waits"] += any(x.dtype in (torch.bool, torch.uint8) for x in places)
        for _ in [x for x in places if not isinstance(x, Counted)]:
            counts.update(["to device", "waits"])
    if goes_there:
        kwargs["device"], there = "cpu", True
    counts["kernels"] += 1
    inner = tree_map(lambda x: x.inner if isinstance(x, Counted) else x, (args, kwargs))
    out = func(*inner[0], **inner[1])
    if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
        return args[0]
    return tree_map(lambda x: Counted(x) if isinstance(x, torch.Tensor) and there else x, out)


class MakingTensors(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU and copies them, as torch does in C++ for a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            like = args[0] if func is torch.Tensor.new_tensor else None
            device = kwargs.pop("device", like.device if like is not None else None)
            if like is not None:
                kwargs.setdefault("dtype", like.dtype)
                func, args = torch.tensor, args[1:]
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        return func(*args, **kwargs)


class Module:
    """What torch asks of a backend's module."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0


def synchronize(device: torch.device) -> None:
    """In place of `torch.accelerator.synchronize`, which asks C++."""
    counts["waits"] += 1


_setup_privateuseone_for_python_backend("counted", backend_module=Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(run, "PrivateUse1")


# -- what the test asks for -------------------------------------------------------------------------------------------

IDS = [[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]]
GREEDY = {"do_sample": False}
KINDS: dict[str, tuple[bool, dict]] = {
    "greedy": (False, GREEDY),
    "greedy, by passes that a graph captures": (True, GREEDY),
    "greedy, with a processor": (False, {**GREEDY, "repetition_penalty": 1.1}),
    "sampled": (False, {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}),
}
"""Whether passes are those that a graph captures, and options of generate()."""


def written(model, new_tokens: int, options: dict) -> list[int]:
    torch.manual_seed(0)
    counts.clear()
    ids = torch.tensor(IDS).to(model.device)
    return model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[], **options)[0].tolist()


def main() -> None:
    """Write texts of two lengths, and print what the longer one counted more: JSON, for each of KINDS.

    The cost of the prompt is in both. In a process of its own, because a backend cannot be removed again.
    """
    torch.accelerator.synchronize = synchronize
    probe.takes_inference_mode = lambda model, adapter: False  # a backend in Python has no inference mode
    static.is_plain = lambda tensor: True  # `Counted` holds another tensor
    found = {}
    for kind, (by_graphs, options) in KINDS.items():
        model = tiny_model("llama")
        expected = written(model, 48, options)
        with MakingTensors():
            lookahead.wrap(model.to("counted"), LookaheadConfig(budget=8, window_size=0, cuda_graphs=by_graphs))
            model.lookahead.graphs = StepGraphs(model, capture=None) if by_graphs else None
            figures: Counter = Counter()
            for new_tokens, sign in ((16, -1), (48, 1)):
                text = written(model, new_tokens, options)
                assert text == expected[: len(text)]
                stats = model.lookahead.last
                for name, count in {**counts, "tokens": stats.tokens, "steps": stats.steps}.items():
                    figures[name] += sign * count
            assert ("given up" not in model.lookahead.report()) or not by_graphs
        found[kind] = figures
    print(json.dumps(found))


if __name__ == "__main__":
    main()
