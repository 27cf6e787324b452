"""Pool files: one preamble, one header, then arrays.

magic "NGRMPOOL" | version, uint32 | length of the header, uint32 | length of the file, uint64
    | xxh3-128 of the fields before it and of all that follows, 16 bytes
header, JSON: the caller's fields; "arrays": name, dtype, shape of each
arrays, in the header's order

A save writes to a temporary file beside the pool, which it keeps locked. Whoever finds such a file of the same pool
without a lock knows that its process was killed, on whichever machine, and removes it.
"""

import json
import math
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from ngram_pool.memory import check_fits

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # not a module there

MAGIC = b"NGRMPOOL"
VERSION = 2  # to be raised with any change of the arrays, of the hashing or of the kinds of contexts
_FIELDS = struct.Struct("<8sIIQ")
_PREAMBLE = _FIELDS.size + 16
_LONGEST_HEADER = 2**16  # bytes; what is parsed takes many times as much
_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.uint8, np.int32, np.uint32, np.uint64, np.float32, float)}


class PoolFileError(ValueError):
    """A file that is no pool of this version and vocabulary, or not a whole one."""


def write(path: str | os.PathLike, header: dict, arrays: dict[str, np.ndarray]) -> None:
    """Replace ``path`` atomically: a temporary file beside it is written, synced to disk and renamed.

    A new file is for its owner alone (mode 0600). A file that is replaced hands on its mode, and its owner and group
    where this process may give files to them; where it may not, they become the process's own, and the group loses
    its rights.

    Raises ValueError for a header that is too long; OSError if the file cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": described}).encode()
    if len(head) > _LONGEST_HEADER:
        raise ValueError(f"a header of {len(head)} bytes, above {_LONGEST_HEADER}: shorten the vocabulary's name")
    parts: list[bytes | memoryview] = [head]
    parts += (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values())
    size = _PREAMBLE + sum(len(part) for part in parts)
    fields = _FIELDS.pack(MAGIC, VERSION, len(head), size)
    digest = xxhash.xxh3_128(fields)
    for part in parts:
        digest.update(part)
    replaced = os.lstat(path) if os.path.lexists(path) else None
    if replaced is not None and not stat.S_ISREG(replaced.st_mode):
        raise OSError(f"{path} is not a regular file, and would be replaced by one: name another")
    _remove_leftovers(path)
    with _temporary(path) as (file, temporary):
        file.write(fields + digest.digest())
        for part in parts:
            file.write(part)
        file.flush()
        if replaced is not None and hasattr(os, "fchown"):
            _hand_on(replaced, file.fileno())
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # Windows renames no open file
        os.replace(temporary, path)
    with suppress(OSError):  # make the rename durable too, where the system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _prefix(path: Path) -> str:
    """What the names of the temporary files of one pool begin with, however long its own name is."""
    return f".{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A locked file beside ``path``, for its owner alone, and its name; removed in the end if it still has that."""
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if _lock(file.fileno()) is not False and temporary.exists():
                    yield file, temporary
                    return
                # Someone took it for a leftover before it was locked: once more, under another name.
        finally:
            temporary.unlink(missing_ok=True)


def _lock(file: int) -> bool | None:
    """Lock a file until it is closed. False if another process has locked it; None where files cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return None
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove what killed saves to ``path`` have left beside it. Files that cannot be locked are left alone."""
    if fcntl is None:
        return
    leftovers = re.compile(re.escape(_prefix(path)) + r"[0-9a-f]{16}\.tmp")
    with suppress(OSError):
        for name in filter(leftovers.fullmatch, os.listdir(path.parent)):
            with suppress(OSError):
                leftover = path.with_name(name)
                file = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if _lock(file):
                        os.unlink(leftover)
                finally:
                    os.close(file)


def _hand_on(replaced: os.stat_result, file: int) -> None:
    """Give an open file the mode of the one that it replaces, and its owner and group where this process may."""
    mode = stat.S_IMODE(replaced.st_mode) & 0o777
    try:
        os.fchown(file, replaced.st_uid, replaced.st_gid)
    except OSError:
        try:
            os.fchown(file, -1, replaced.st_gid)
        except OSError:
            mode &= ~stat.S_IRWXG  # they were another group's
    os.fchmod(file, mode)


def is_pool_file(path: str | os.PathLike) -> bool:
    """Whether a file begins as pool files do, whole or not."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of a file, read into memory.

    Nothing is mapped: whoever shortens a mapped file takes the process down. Takes the memory of the arrays, which is
    never more than the file's length, and what a short header needs.

    Raises PoolFileError if it is not one, truncated, corrupted, of another version or larger than the machine's memory;
    OSError if it cannot be opened or read.
    """
    with open(path, "rb") as file:
        preamble = file.read(_PREAMBLE)
        if not preamble or preamble[: len(MAGIC)] != MAGIC[: len(preamble)]:
            raise PoolFileError(f"{path} is not a pool file")
        if len(preamble) < _PREAMBLE:
            raise PoolFileError(f"{path} is truncated: {len(preamble)} bytes")
        _, version, head_length, length = _FIELDS.unpack_from(preamble)
        if version > VERSION:
            raise PoolFileError(f"{path} has format {version}, newer than {VERSION}, the newest known here: upgrade")
        if version < VERSION:
            raise PoolFileError(f"{path} has format {version}, which is no longer read: build the pool again")
        size = os.fstat(file.fileno()).st_size
        if size < length:
            raise PoolFileError(f"{path} is truncated: {size} of {length} bytes")
        if size > length:
            raise PoolFileError(f"{path} is corrupted: {size} bytes where it says {length}")
        digest = xxhash.xxh3_128(preamble[: _FIELDS.size])
        head = file.read(min(head_length, _LONGEST_HEADER))
        digest.update(head)
        try:
            if len(head) < head_length:
                raise ValueError(f"a header of {head_length} bytes")
            header, arrays = _described(head, length - _PREAMBLE - head_length)
        except (ValueError, RecursionError, MemoryError) as error:
            raise PoolFileError(f"{path} is corrupted or not of this format: {error}") from error
        for array in arrays.values():
            content = array.reshape(-1).view(np.uint8).data
            file.readinto(content)  # less, if someone shortens the file just now; the checksum tells
            digest.update(content)
    if digest.digest() != preamble[_FIELDS.size :]:
        raise PoolFileError(f"{path} is corrupted: its content does not match its checksum")
    return header, arrays


def _described(head: bytes, nbytes: int) -> tuple[dict, dict[str, np.ndarray]]:
    """The caller's fields, and arrays to be filled with the ``nbytes`` that follow. Trusts nothing.

    Raises ValueError for anything that `write` would not write; RecursionError for JSON too deep; MemoryError.
    """
    header = json.loads(head)
    if not isinstance(header, dict) or not isinstance(header.get("arrays"), list):
        raise ValueError("the header names no arrays")
    kinds = {}
    for described in header.pop("arrays"):
        if not isinstance(described, list) or len(described) != 3:
            raise ValueError("an array is not described by name, dtype and shape")
        name, dtype, shape = described
        if not isinstance(name, str) or name in kinds:
            raise ValueError("an array has no name, or that of another")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError("an array is of an unknown dtype")
        if not isinstance(shape, list) or not all(type(side) is int and 0 <= side <= nbytes for side in shape):
            raise ValueError("a shape is not a list of sizes that the file has room for")
        kinds[name] = _DTYPES[dtype], shape
    described = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
    if described != nbytes:
        raise ValueError(f"{nbytes} bytes of arrays where the header describes {described}")
    check_fits(nbytes)
    return header, {name: np.empty(shape, dtype) for name, (dtype, shape) in kinds.items()}
