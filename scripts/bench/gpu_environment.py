"""The first stage of scripts/gpu.py. Packages that may be missing are imported late, so that the page can say so."""

import re
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from shutil import which

from bench.pages import table

ROOT = Path(__file__).parents[2]
COMMANDS = {"nvidia-smi": ["nvidia-smi"], "memory": ["free", "-g"], "disk": ["df", "-h", "/tmp", "."]}
NEEDED = (  # modules that later stages import
    "lookahead", "lookahead.tools.audit", "lookahead.passes.graphs", "benchmark", "ballast", "compare_batches",
)  # fmt: skip


def environment(plan, report) -> tuple[str, dict]:
    """What is installed, what is missing, and what the device can do."""
    asked = re.findall(r'^    "([\w-]+)([<>=][^"]*)",', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    rows = []
    for name, wanted in [*asked, ("triton", ""), ("safetensors", ""), ("tokenizers", ""), ("huggingface-hub", "")]:
        try:
            rows.append([name, wanted, metadata.version(name)])
        except metadata.PackageNotFoundError:
            rows.append([name, wanted, "missing"])
    results: dict = {"command": plan.command, "python": sys.version, "packages": rows}
    results["programs"] = {name: which(name) for name in ("nvcc", "g++", "clang++", "nvidia-smi")}
    for name, command in COMMANDS.items():
        if which(command[0]):
            results[name] = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    report.write(_environment_page(results), results)  # before anything can fail
    import torch

    device = torch.device(plan.device)
    results["torch"] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(), "tf32": torch.backends.cuda.matmul.allow_tf32,
        "flash": torch.backends.cuda.flash_sdp_enabled(), "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    if device.type == "cuda":
        results["torch"]["properties"] = str(torch.cuda.get_device_properties(device))
        results["torch"]["free and total bytes"] = torch.cuda.mem_get_info(device)
    results["measured"] = _speeds(device, plan.is_small)
    results["imports"] = _imports()
    return _environment_page(results), results


def _speeds(device, is_small: bool) -> dict:
    """The rates that limit a pass: bytes copied and products computed in a second."""
    import torch

    from bench.timing import waited

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    numbers = torch.ones(2**22 if is_small else 2**31, dtype=torch.uint8, device=device)
    size = 256 if is_small else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    target = torch.empty_like(numbers)
    copying = min(waited(lambda: target.copy_(numbers), device) for _ in range(6))
    product = min(waited(lambda: a @ b, device) for _ in range(6))
    small = torch.zeros(1, device=device)
    launch = statistics.median(waited(lambda: small.add_(1), device) for _ in range(50))
    number = statistics.median(waited(lambda: small.item(), device) for _ in range(50))
    return {
        "GB/s copied, read and written": 2 * numbers.nbytes / copying / 1e9,
        f"TFLOP/s of a product of {size} x {size}, {dtype}": 2 * size**3 / product / 1e12,
        "us to launch a kernel and wait for it": 1e6 * launch,
        "us to read a number": 1e6 * number,
    }


def _imports() -> dict[str, str]:
    """For each module that later stages need, "" or the error of its import."""
    found = {}
    for name in NEEDED:
        try:
            __import__(name)
            found[name] = ""
        except Exception as error:
            found[name] = repr(error)
    return found


def _environment_page(results: dict) -> str:
    parts = [f"`{results['command']}`", f"Python {results['python']}"]
    parts.append(table(["package", "asked for", "found"], results["packages"]))
    for name in ("programs", "torch", "measured", "imports"):
        if name in results:
            parts.append(table([name, ""], [[key, str(value)] for key, value in results[name].items()]))
    parts += [f"```\n{results[name].rstrip()}\n```" for name in COMMANDS if name in results]
    return "\n\n".join(parts)
