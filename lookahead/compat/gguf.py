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
    """A class of transformers' modules that keep the blocks of a GGUF file; None before transformers 5.24."""
    with suppress(ImportError, AttributeError):
        return getattr(import_module("transformers.integrations.gguf.utils"), name)
    return None


def gguf_name(ggml_type: int) -> str:
    """The name of a block format."""
    return import_module("transformers.integrations.gguf.dequant").GGML_NAME.get(ggml_type, str(ggml_type))


def config_of(path: str) -> dict[str, Any]:
    """The model's configuration, from the metadata of a GGUF file."""
    return import_module(_LOADING).load_gguf_checkpoint(path)["config"]


@contextmanager
def metadata_read_once() -> Iterator[None]:
    """In this block, transformers parses the metadata of a GGUF file only once. Otherwise it does so for the
    configuration, for the tokenizer and for the model, which takes seconds with 100,000 tokens.
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


@contextmanager
def _table_of_names_made_once() -> Iterator[None]:
    """In this block, transformers gets gguf's table of an architecture's names only once, instead of for each module,
    which takes seconds.
    """
    package: Any = import_module("gguf")
    make = package.get_tensor_name_map
    package.get_tensor_name_map = cache(make)
    try:
        yield
    finally:
        package.get_tensor_name_map = make


def has_conversions(architecture: str) -> bool:
    """Whether transformers (from 5.24 on) loads files of this architecture by a way that this module does not know."""
    with suppress(ImportError, AttributeError):
        return architecture in import_module("transformers.integrations.gguf").GGUF_ARCHS
    return False


class Conversion:
    """How transformers converts the tensors of a GGUF file to parameters."""

    def __init__(self, model: nn.Module, architecture: str, config: dict[str, Any]):
        """architecture, config: of the file's model."""
        loading = import_module(_LOADING)
        self._processor = loading.TENSOR_PROCESSORS.get(architecture, loading.TensorProcessor)(config=config)
        with _table_of_names_made_once():
            self._names = loading.get_gguf_hf_weights_map(model, self._processor)

    def name_of(self, name: str) -> str | None:
        """The parameter that a tensor becomes; None if there is none, or if it holds several tensors."""
        return self._names.get(name)

    def convert(self, name: str, numbers: np.ndarray, found: dict[str, Any]) -> tuple[str | None, np.ndarray]:
        """Return the name and numbers of a parameter; None as the name if they were written into ``found`` instead."""
        loading_state = {"tensors": found}
        result = self._processor.process(
            weights=numbers, name=name, tensor_key_mapping=self._names, parsed_parameters=loading_state
        )
        return self._names.get(result.name), result.weights

    def order_of_rows(self, name: str, rows: int) -> np.ndarray | None:
        """For each row of the parameter, its row in the tensor; None if the conversion does more than reorder rows."""
        numbers = np.repeat(np.arange(rows)[:, None], 2, axis=1)
        with suppress(Exception):  # the conversion may fail for tensors of this shape
            converted, order = self.convert(name, numbers, {})
            is_whole = order.shape == numbers.shape and (order[:, 0] == order[:, 1]).all()
            if converted == self.name_of(name) and is_whole and (np.sort(order[:, 0]) == numbers[:, 0]).all():
                return order[:, 0]
        return None

    def part_of(self, name: str) -> tuple[str, int, int] | None:
        """The parameter that contains a tensor of matrices; which part of its rows they are, and of how many parts.

        None if they are converted in another way.
        """
        numbers, found = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4), dict[str, Any]()
        with suppress(Exception):  # the conversion may fail for tensors of this shape
            self.convert(name, numbers, found)
            ((parameter, taken),) = found.items()
            of = taken.shape[1] // 3
            for part in range(of):
                alone = np.zeros((2, of, 3, 4), np.float32)
                alone[:, part] = numbers
                if np.array_equal(taken, alone.reshape(2, -1, 4)):
                    return parameter, part, of
        return None
