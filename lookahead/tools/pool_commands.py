"""The commands ``lookahead pool build``, ``merge`` and ``show``. Their arguments are the options in `cli`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from lookahead.tools.files import TEXT, explained, reading, writing
from lookahead.tools.loading import load_pool, load_tokenizer
from lookahead.vocabulary import vocabulary_fingerprint
from ngram_pool import NgramPool, Origin, storage

READ_AT_ONCE = 2**20  # characters of a file that are tokenized together


def build(
    files: tuple[str, ...], model_name: str | None, out: Path, pool_path: str | None, memory_mb: float | None
) -> None:
    if pool_path and memory_mb:
        raise click.UsageError("--memory-mb is for a new pool: the pool of --pool keeps its size")
    check_out(out)
    tokenizer = load_tokenizer(model_name)
    if pool_path:
        learned = load_pool(pool_path, vocabulary_fingerprint(tokenizer))
    else:
        try:
            learned = NgramPool(memory_mb or 64, vocabulary_fingerprint(tokenizer))
        except (ValueError, MemoryError) as error:
            raise click.UsageError(f"--memory-mb: {error}") from error
    tokens = 0
    with click.progressbar(length=sum(map(os.path.getsize, files)), label="learning", file=sys.stderr) as progress:
        for path in files:
            for text in _parts(path):
                ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
                learned.learn(ids, Origin.FILE)
                tokens += len(ids)
                progress.update(len(text.encode()))
    with writing(out):
        learned.save(out)
    click.echo(f"{out}: {tokens:,} tokens of {len(files)} files; {_size(learned)}")
    if len(learned) > 0.99 * learned.capacity:
        click.echo("note: the pool is full and has dropped contexts; a larger --memory-mb keeps more", err=True)


def merge(files: tuple[str, ...], out: Path, since_path: str | None) -> None:
    if len(files) < 2:
        raise click.UsageError("give at least two FILES to merge")
    check_out(out)
    merged = load_pool(files[0])
    since = load_pool(since_path, merged.vocabulary) if since_path else None
    with click.progressbar(files[1:], label="merging", file=sys.stderr) as progress:
        for path in progress:
            other = load_pool(path, merged.vocabulary)
            with explained(path, ValueError):
                merged.merge(other, since)
    with writing(out):
        merged.save(out)
    click.echo(f"{out}: {len(files)} pools; {_size(merged)}")


def show(path: str, model_name: str | None, top: int) -> None:
    held = load_pool(path)
    tokenizer = load_tokenizer(model_name)
    vocabulary = vocabulary_fingerprint(tokenizer)
    click.echo(f"{path}: {_size(held)}")
    click.echo(f"{held.observations:,} observations; vocabulary {held.vocabulary or 'unknown'}")
    sources = ", ".join(f"{name} {count:,}" for name, count in held.by_source().items() if count)
    click.echo(f"next tokens by source: {sources or 'none'}")
    is_known = held.vocabulary in (None, vocabulary)
    if not is_known:
        click.echo(
            f"shown as ids: the vocabulary of {model_name or 'the packaged model'} is {vocabulary}; give --model"
        )
    for context, token, probability, seen in held.most_confident(top):
        before, after = (tokenizer.decode(context), tokenizer.decode([token])) if is_known else (context, token)
        click.echo(f"  {before!r} -> {after!r}  {probability:.3f} of {seen}")


def _parts(path: str) -> Iterator[str]:
    """Yield a file's text in runs of whole lines. Raises ClickException if it cannot be read."""
    with reading(path), open(path, encoding=TEXT) as file:
        while lines := file.readlines(READ_AT_ONCE):
            yield "".join(lines)


def check_out(out: Path) -> None:
    """Raise UsageError if a pool written to ``out`` would replace another kind of file."""
    with reading(out):
        if out.exists() and not (out.is_file() and (out.stat().st_size == 0 or storage.is_pool_file(out))):
            raise click.UsageError(f"{out} is not a pool file, and would be lost: name another file")


def _size(held: NgramPool) -> str:
    return f"{len(held):,} contexts in {held.nbytes / 2**20:.1f} MiB, {len(held) / held.capacity:.0%} full"
