"""What was found out about models, stored in the user's cache directory for later processes."""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import xxhash
from transformers import PreTrainedModel

from lookahead.compat import settings_of

logger = logging.getLogger(__name__)

FOLDER = Path(platformdirs.user_cache_dir("lookahead"))


def path_of(kind: str, model: PreTrainedModel, *depends_on: object) -> Path:
    """Return the file of findings of one kind, named by the model and everything else that they depend on."""
    everything = [type(model).__name__, settings_of(model.config), *depends_on]
    return path_by(kind, model, json.dumps(everything, sort_keys=True, default=str))


def path_by(kind: str, model: PreTrainedModel, text: str) -> Path:
    """`path_of`, by a text that says all that they depend on."""
    return FOLDER / kind / f"{model.config.model_type}-{xxhash.xxh3_128_hexdigest(text.encode())}.json"


def read(path: Path) -> dict[str, Any] | None:
    """Read a file. None: there is none, or it is not valid."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False)  # noqa: SIM115
    try:
        with file:
            json.dump(data, file, indent=1)
        os.replace(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)  # missing if it was renamed


def keep(path: Path, data: dict[str, Any]) -> None:
    """Write a file. If that fails, the next process finds the same out again."""
    try:
        write(path, data)
    except OSError as error:
        logger.info("%s are not kept: %s", path.parent.name, error)
