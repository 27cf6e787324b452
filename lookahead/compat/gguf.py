"""Private names of transformers' support of GGUF files, each behind a function."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from torch import nn

_LOADING = "transformers.modeling_gguf_pytorch_utils"


@cache
def gguf_class(name: str) -> Any:
    """A class of modules that keep the blocks of a GGUF file, of transformers 5.24 and newer; None before."""
    with suppress(ImportError, AttributeError):
        return getattr(import_module("transformers.integrations.gguf.utils"), name)
    return None


def gguf_name(ggml_type: int) -> str:
    """The name of a form of blocks."""
    return import_module("transformers.integrations.gguf.dequant").GGML_NAME.get(ggml_type, str(ggml_type))


def config_of(path: str) -> dict[str, Any]:
    """The settings of the model in a GGUF file, which its metadata say."""
    return import_module(_LOADING).load_gguf_checkpoint(path)["config"]


@contextmanager
def metadata_read_once() -> Iterator[None]:
    """Within, transformers reads the metadata of a GGUF file once. Else it reads them for the configuration, for the
    words and for the model each, which takes seconds where there are 100,000 words.
    """
    loading: Any = import_module(_LOADING)
    read = loading.load_gguf_checkpoint
    known: dict[str, Any] = {}

    def read_once(path: str, return_tensors: bool = False, **others: Any) -> dict[str, Any]:
        if return_tensors:
            return read(path, return_tensors, **others)
        if path not in known:
            known[path] = read(path)
        return deepcopy(known[path])

    loading.load_gguf_checkpoint = read_once
    try:
        yield
    finally:
        loading.load_gguf_checkpoint = read


def has_conversions(architecture: str) -> bool:
    """Whether transformers loads the files of an architecture in another way, from 5.24 on, than this module knows."""
    with suppress(ImportError, AttributeError):
        return architecture in import_module("transformers.integrations.gguf").GGUF_ARCHS
    return False


class Conversion:
    """What transformers makes of the tensors of a GGUF file."""

    def __init__(self, model: nn.Module, architecture: str, config: dict[str, Any]):
        """architecture, config: what the file says of the model."""
        loading = import_module(_LOADING)
        self._processor = loading.TENSOR_PROCESSORS.get(architecture, loading.TensorProcessor)(config=config)
        self._names = loading.get_gguf_hf_weights_map(model, self._processor)

    def name_of(self, name: str) -> str | None:
        """The parameter that a tensor becomes; None if it becomes none, or not it alone."""
        return self._names.get(name)

    def convert(self, name: str, numbers: np.ndarray, found: dict[str, Any]) -> tuple[str | None, np.ndarray]:
        """Return the name of a parameter and its numbers; without a name where those in ``found`` are written to."""
        loading_state = {"tensors": found}
        result = self._processor.process(
            weights=numbers, name=name, tensor_key_mapping=self._names, parsed_parameters=loading_state
        )
        return self._names.get(result.name), result.weights

    def order_of_rows(self, name: str, rows: int) -> np.ndarray | None:
        """Which row of a tensor each row of the parameter is; None if more is done to them than ordering."""
        numbers = np.repeat(np.arange(rows)[:, None], 2, axis=1)
        with suppress(Exception):  # what is done to tensors of other shapes may fail
            converted, order = self.convert(name, numbers, {})
            is_whole = order.shape == numbers.shape and (order[:, 0] == order[:, 1]).all()
            if converted == self.name_of(name) and is_whole and (np.sort(order[:, 0]) == numbers[:, 0]).all():
                return order[:, 0]
        return None

    def part_of(self, name: str) -> tuple[str, int, int] | None:
        """The parameter that takes a tensor of matrices, which part of its rows they become, and of how many parts.

        None if something else is done to them.
        """
        numbers, found = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4), dict[str, Any]()
        with suppress(Exception):  # what is done to tensors of other shapes may fail
            self.convert(name, numbers, found)
            ((parameter, taken),) = found.items()
            of = taken.shape[1] // 3
            for part in range(of):
                alone = np.zeros((2, of, 3, 4), np.float32)
                alone[:, part] = numbers
                if np.array_equal(taken, alone.reshape(2, -1, 4)):
                    return parameter, part, of
        return None
