"""Read the published files of trained heads: config.json and the tensors."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")


@dataclass
class Checkpoint:
    """A folder's tensors by name; `read` removes a tensor, so `finish` finds those that nothing used."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    device: torch.device
    """The device of read tensors."""
    dtype: torch.dtype
    """The dtype of read tensors."""

    @classmethod
    def load(cls, path: str | Path, device: torch.device, dtype: torch.dtype) -> "Checkpoint":
        """Read config.json and all tensors of a folder: safetensors or pytorch's .bin and .pt, also in several files.

        Only tensors are read from pytorch's files; no code in them is run.
        Raises FileNotFoundError if a file is missing. Raises ValueError for a file that cannot be read.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is not a folder: download the heads first, e.g. by huggingface_hub.snapshot_download(name)"
            )
        config = _read_json(folder / "config.json")
        tensors: dict[str, torch.Tensor] = {}
        for name in _files_in(folder):
            tensors |= _read_tensors(folder / name)
        return cls(folder, config, tensors, device, dtype)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, *shape: int | None) -> torch.Tensor:
        """Read a tensor of floats of this shape, converted; None is any size.

        Raises ValueError if the tensor is missing, is of other numbers, or has another shape.
        """
        tensor = self._taken(name, *shape)
        if not tensor.is_floating_point():
            raise ValueError(
                f"the tensor {name!r} of {self.folder} is of {tensor.dtype}: heads must be of floats, not quantized"
            )
        return tensor.to(self.device, self.dtype)

    def read_ids(self, name: str) -> np.ndarray | None:
        """Read a list of tokens, int64; None if there is none. Raises ValueError if it is empty or of other numbers."""
        if name not in self.tensors:
            return None
        tensor = self._taken(name, None)
        if tensor.is_floating_point() or tensor.is_complex() or not len(tensor):
            raise ValueError(
                f"the tensor {name!r} of {self.folder} has {len(tensor)} numbers of {tensor.dtype}: it must list tokens"
            )
        return tensor.cpu().numpy().astype(np.int64)

    def _taken(self, name: str, *shape: int | None) -> torch.Tensor:
        """Take out a tensor of this shape."""
        if name not in self.tensors:
            raise ValueError(f"{self.folder} lacks the tensor {name!r}; it has {_some(self.tensors)}")
        tensor = self.tensors.pop(name)
        fits = len(shape) == tensor.ndim and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(
                f"the tensor {name!r} of {self.folder} has shape {list(tensor.shape)}, not [{wanted}]: these heads "
                "were made for another model, or config.json belongs to other heads"
            )
        return tensor

    def find(self, name: str, *shape: int | None) -> torch.Tensor | None:
        return self.read(name, *shape) if name in self.tensors else None

    def finish(self) -> None:
        """Raise ValueError if tensors were not read, because they are a part of the head that is unknown here."""
        if self.tensors:
            raise ValueError(f"{self.folder} has tensors of an unknown layout: {_some(self.tensors)}")


@dataclass(frozen=True)
class Sizes:
    """What heads need a model to have."""

    vocabulary: int
    hidden: int
    layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Sizes":
        """Raises ValueError if the model has no lm_head."""
        vocabulary, hidden = projection_of(model).weight.shape
        return cls(vocabulary, hidden, depth_of(model))

    def __str__(self) -> str:
        return f"{self.vocabulary} tokens, hidden size {self.hidden} and {self.layers} layers"

    def check(self, model: PreTrainedModel, name: str) -> None:
        """Raise ValueError, which names the heads, if a model is of other sizes than the one they were made for."""
        found = Sizes.of(model)
        if (found.hidden, found.layers) != (self.hidden, self.layers) or found.vocabulary < self.vocabulary:
            raise ValueError(
                f"the {name} was made for a model with {self}, not for this {type(model).__name__} with {found}: "
                "make it for the model that decodes"
            )


def projection_of(model: PreTrainedModel) -> nn.Linear:
    """The model's lm_head. Raises ValueError if it has none."""
    projection = model.get_output_embeddings()
    if projection is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings, which heads need")
    return projection  # type: ignore[return-value]  # a linear layer, or a module that replaces one


def depth_of(model: PreTrainedModel) -> int:
    """The number of layers, which is also the number of the last hidden state. A configuration may count otherwise."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = getattr(model.get_decoder(), "layers", None)
    return count if layers is None else min(count, len(layers))


def _files_in(folder: Path) -> list[str]:
    """Names of the files that hold the tensors."""
    for index in INDICES:
        if (folder / index).is_file():
            places = _read_json(folder / index).get("weight_map", {})
            if not isinstance(places, dict):
                raise ValueError(f"{folder / index} holds no weight_map that names files")
            for name in places.values():
                if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                    raise ValueError(f"{folder / index} names {name!r}, which is not a file of its folder")
            return sorted(set(places.values()))
    for name in FILES:
        if (folder / name).is_file():
            return [name]
    raise FileNotFoundError(f"{folder} holds none of {', '.join((*FILES, *INDICES))}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {content!r:.60} instead of an object")
    return content


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):  # they say what is wrong
        raise
    except Exception as error:  # a damaged file may be taken for anything
        raise ValueError(f"{path} cannot be read, or holds more than tensors: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise ValueError(f"{path} holds {type(found).__name__} instead of tensors by name")
    return found


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:8])) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
