"""Load GGUF files, and keep the weights in the file's blocks."""

import math
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lookahead.compat.gguf import Conversion, config_of, has_conversions
from lookahead.cpu import native
from lookahead.cpu.executor import serves
from lookahead.cpu.gguf import BlocksEmbedding, BlocksExperts, BlocksLinear
from lookahead.cpu.products import Format
from lookahead.models.families import UnknownModelError, page_of

_VERSIONS = 2, 3
_SETTINGS = {"general.alignment": 32, "general.architecture": None}
"""Metadata of the file itself, and their defaults."""
_KINDS = {kind.value: kind for kind in GGMLQuantizationType}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_EXPERTS = "Qwen2MoeExperts", "Qwen3MoeExperts", "MiniMaxM2Experts"  # classes that BlocksExperts can replace
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_TEXT, _ARRAY = 8, 9  # types of metadata without a fixed size


def load_gguf(path: str | os.PathLike) -> PreTrainedModel:
    """Load the model of a GGUF file on the CPU, in float32 and in eval mode, and keep its weights in the file's blocks.

    The file is mapped, not read, so it must not change while the model is used. The weights are those that
    ``AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)`` unpacks. Matrices stay in
    blocks, and so do the experts of Qwen2-MoE, Qwen3-MoE and MiniMax-M2. Tensors are unpacked if our kernels cannot
    read their format, or if transformers does more to them than to reorder rows. The whole model is unpacked if its
    passes could not be fused with blocks: without our C++, for a family without a page, and for architectures whose
    files transformers converts in another way (Qwen3.5 and LFM2 from 5.24 on).

    Raises ImportError without gguf and accelerate, OSError and ValueError for a file that cannot be read, and
    RuntimeError for a file whose tensors do not match its metadata.
    """
    path = Path(path)
    file = _File(path)
    if native.why_missing() is None and not has_conversions(file.architecture):
        with suppress(UnknownModelError):
            model = _in_blocks(file, path)
            if serves(page_of(model).program()):
                return model
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def _in_blocks(file: "_File", path: Path) -> PreTrainedModel:
    """Return the model of a file, with as many weights in blocks as possible.

    Raises UnknownModelError if tensors are missing or have other shapes than the model's. transformers then warns.
    """
    from accelerate import init_empty_weights

    config = config_of(str(path))
    try:
        settings = AutoConfig.for_model(**config)
        # A wrong number could be huge, and making so many layers would take all memory.
        if (layers := getattr(settings, "num_hidden_layers", 0)) > len(file.tensors):
            raise ValueError(f"it has {len(file.tensors)} tensors for {layers} layers")
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    except Exception as error:  # its class depends on what is wrong
        raise ValueError(f"transformers cannot make a model from the metadata of {path}: {error}") from error
    conversion = Conversion(model, file.architecture, config)
    mapped = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    numbers: dict[str, torch.Tensor] = {}
    kept = _keep_experts(model, conversion, file, mapped)
    for name, tensor in file.tensors.items():
        blocks = file.blocks(mapped, tensor)
        if name not in kept and not _keep(model, conversion, name, blocks, tensor):
            parameter, values = conversion.convert(name, dequantize(blocks.numpy(), tensor.kind), numbers)
            if parameter is not None:
                numbers[parameter] = torch.from_numpy(np.array(values, np.float32))
    try:
        model.load_state_dict(numbers, strict=False, assign=True)
    except RuntimeError as error:
        raise UnknownModelError(str(error)) from error
    model.tie_weights()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if config["tie_word_embeddings"] and isinstance(table, BlocksEmbedding):
        model.set_output_embeddings(BlocksLinear(table.weight, table.format, head.bias))
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnknownModelError(f"{path} lacks tensors")
    return model.eval()


def _keep(model: nn.Module, conversion: Conversion, name: str, blocks: torch.Tensor, tensor: "_Tensor") -> bool:
    """Replace the module whose weight this is by one that keeps the blocks. Returns whether that is possible."""
    kind = tensor.kind
    place, _, weight = (conversion.name_of(name) or "").rpartition(".")
    if kind.name not in Format.__members__ or blocks.ndim != 2 or weight != "weight":
        return False
    module: Any = model.get_submodule(place)
    format = Format[kind.name]
    is_table = isinstance(module, nn.Embedding) and module.max_norm is None
    is_scaled = is_table and type(module).__name__.endswith("ScaledWordEmbedding")
    is_known = type(module) in (nn.Linear, nn.Embedding) or is_scaled
    if not is_known or module.weight.shape != tensor.shape:
        return False
    if (order := conversion.order_of_rows(name, len(blocks))) is None:
        return False
    if (order[1:] < order[:-1]).any():  # otherwise the blocks stay in the mapped file
        blocks = blocks[order]
    kept = nn.Parameter(blocks, requires_grad=False)
    scale = torch.as_tensor(module.embed_scale) if is_scaled else None
    model.set_submodule(
        place, BlocksEmbedding(kept, format, scale) if is_table else BlocksLinear(kept, format, module.bias)
    )
    return True


def _keep_experts(model: nn.Module, conversion: Conversion, file: "_File", mapped: torch.Tensor) -> set[str]:
    """Replace experts by modules that keep blocks, in layers where all three tensors can. Return the tensors' names."""
    found: dict[str, dict[tuple[str, int, int], str]] = {}
    for name, tensor in file.tensors.items():
        if tensor.kind.name in Format.__members__ and len(tensor.shape) == 3:
            parameter, part, of = conversion.part_of(name) or ("", 0, 0)
            place, _, weight = parameter.rpartition(".")
            found.setdefault(place, {})[weight, part, of] = name
    kept: set[str] = set()
    for place, names in found.items():
        module: Any = model.get_submodule(place)
        parts = {
            "gate_proj": ("gate_up_proj", 0, 2),
            "up_proj": ("gate_up_proj", 1, 2),
            "down_proj": ("down_proj", 0, 1),
        }
        if type(module).__name__ not in _EXPERTS or names.keys() != set(parts.values()):
            continue
        tensors = {name: file.tensors[names[part]] for name, part in parts.items()}
        count, width, inner = module.down_proj.shape
        shapes = {
            "gate_proj": (count, inner, width),
            "up_proj": (count, inner, width),
            "down_proj": (count, width, inner),
        }
        if any(tensors[name].shape != shape for name, shape in shapes.items()):
            continue
        weights = {
            name: (nn.Parameter(file.blocks(mapped, tensor), requires_grad=False), Format[tensor.kind.name])
            for name, tensor in tensors.items()
        }
        model.set_submodule(place, BlocksExperts(module.act_fn, **weights))
        kept.update(names.values())
    return kept


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    """In torch's order."""
    kind: GGMLQuantizationType
    offset: int
    """In bytes, from the beginning of the first tensor."""


def _is_whole(tensor: _Tensor) -> bool:
    """Whether the shape is one that GGUF allows, without empty dimensions, and its rows are whole blocks."""
    is_tensor = 0 < len(tensor.shape) <= _MOST_DIMENSIONS and all(tensor.shape)
    return is_tensor and tensor.shape[-1] % GGML_QUANT_SIZES[tensor.kind][0] == 0


class _File:
    """Metadata and tensors of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

    def __init__(self, path: Path):
        """Raises ValueError if the file is not valid. Counts and sizes are checked before they are used."""
        self.tensors: dict[str, _Tensor] = {}
        self._at = 0
        metadata: dict[str, Any] = {}
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
            try:
                magic, version, tensors, entries = self._next("4sIQQ")
                if magic != b"GGUF" or version not in _VERSIONS:
                    raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
                for _ in range(entries):
                    name = self._text()
                    metadata[name] = self._value(*self._next("I"))
                for _ in range(tensors):
                    name = self._text()
                    (dimensions,) = self._next("I")
                    shape = self._next(f"{dimensions}Q")[::-1]
                    kind, offset = self._next("IQ")
                    if kind not in _KINDS:
                        raise ValueError(f"{path} has a tensor of type {kind}, which the package gguf does not know")
                    self.tensors[name] = _Tensor(shape, _KINDS[kind], offset)
                alignment, architecture = (metadata.get(name, default) for name, default in _SETTINGS.items())
                if not (isinstance(alignment, int) and alignment > 0 and isinstance(architecture, str)):
                    raise ValueError(f"{path} has the alignment {alignment!r} and the architecture {architecture!r}")
                self._start, self.architecture = -(-self._at // alignment) * alignment, architecture
                for name, tensor in self.tensors.items():
                    if not _is_whole(tensor):
                        raise ValueError(f"{path} has a tensor {name} of {tensor.kind.name} and shape {tensor.shape}")
                    first, shape = self._place(tensor)
                    self._bytes[first + math.prod(shape) - 1]
            except (struct.error, IndexError, KeyError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path} is truncated, or not a GGUF file") from error

    def blocks(self, mapped: torch.Tensor, tensor: _Tensor) -> torch.Tensor:
        """A view of a tensor's bytes in the mapped file, uint8 [..., bytes of a row]."""
        first, shape = self._place(tensor)
        return mapped[first : first + math.prod(shape)].view(shape)

    def _place(self, tensor: _Tensor) -> tuple[int, tuple[int, ...]]:
        """Where a tensor begins in the file, and the shape of its bytes."""
        *rows, inputs = tensor.shape
        weights, size = GGML_QUANT_SIZES[tensor.kind]
        return self._start + tensor.offset, (*rows, inputs // weights * size)

    def _next(self, format: str) -> tuple:
        found = struct.unpack_from(format := "<" + format, self._bytes, self._at)
        self._at += struct.calcsize(format)
        return found

    def _text(self) -> str:
        (length,) = self._next("Q")
        return self._next(f"{length}s")[0].decode()

    def _value(self, kind: int) -> object:
        """Read a value of the metadata. Arrays are skipped and give None: transformers reads them if it needs them."""
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._next(_NUMBERS[kind])[0]
        kind, count = self._next("IQ")
        if kind in _NUMBERS:
            self._at += count * struct.calcsize("<" + _NUMBERS[kind])
            if self._at > len(self._bytes):
                raise IndexError("an array ends beyond the file")
        else:
            for _ in range(count):
                self._value(kind)
        return None
