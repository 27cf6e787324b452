"""Where scripts put what they measured."""

import json
from pathlib import Path


def write_results(out: Path, text: str, results: dict) -> None:
    """Write OUT.md and OUT.json, and the folder that they go to."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
