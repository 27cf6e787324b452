"""The environment of a measurement."""

import platform
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from lookahead import __version__


def environment(model: PreTrainedModel) -> dict[str, str | int]:
    """What a measurement depends on, apart from the model and the command."""
    return {
        "processor": processor(model.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lookahead": __version__,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def processor(device: torch.device) -> str:
    """Name of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
