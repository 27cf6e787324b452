"""Pool files: one preamble, one header, then arrays.

preamble: magic "NGRMPOOL" | version, uint32 | length of the header, uint32 | length of the file, uint64
    | xxh3-128 of these fields, the header and the arrays, 16 bytes
header, JSON: the caller's fields; "arrays": name, dtype and shape of each
arrays, in the header's order

A save writes to a temporary file beside the pool and keeps it locked. If such a file has no lock, the process that
wrote it was killed, on this or another machine; the next save of the same pool removes the file.
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
VERSION = 2  # raise it with any change of the arrays, the hashing or the kinds of contexts
_FIELDS = struct.Struct("<8sIIQ")
_PREAMBLE = _FIELDS.size + 16
_MAX_HEADER = 2**16  # bytes; parsing takes many times that memory
_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.uint8, np.int32, np.uint32, np.uint64, np.float32, float)}


class PoolFileError(ValueError):
    """A file is damaged, or is not a pool of this version and vocabulary."""


def write(path: str | os.PathLike, header: dict, arrays: dict[str, np.ndarray]) -> None:
    """Replace ``path`` atomically: write a temporary file beside it, sync it to disk and rename it.

    A new file has mode 0600. A replaced file hands on its mode, and its owner and group if this process may set them.
    Otherwise the new file belongs to this process, and its group has no rights.

    Raises ValueError for a header that is too long; OSError if the file cannot be written.
    """
    path = Path(os.path.realpath(path))  # replace a link's target, not the link
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": described}).encode()
    if len(head) > _MAX_HEADER:
        raise ValueError(f"the header has {len(head)} bytes, above {_MAX_HEADER}: shorten the vocabulary's name")
    parts: list[bytes | memoryview] = [head]
    parts += (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values())
    size = _PREAMBLE + sum(len(part) for part in parts)
    fields = _FIELDS.pack(MAGIC, VERSION, len(head), size)
    digest = xxhash.xxh3_128(fields)
    for part in parts:
        digest.update(part)
    replaced = os.lstat(path) if os.path.lexists(path) else None
    if replaced is not None and not stat.S_ISREG(replaced.st_mode):
        raise OSError(f"{path} is not a regular file, so it is not replaced: give another name")
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
            file.close()  # Windows cannot rename an open file
        os.replace(temporary, path)
    with suppress(OSError):  # make the rename durable, too, if the system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _prefix(path: Path) -> str:
    """Return the prefix of the names of a pool's temporary files, which is short even for a long name."""
    return f".{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}-"


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open and lock a file of mode 0600 beside ``path``. It is removed at the end, unless it was renamed."""
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if _lock(file.fileno()) is not False and temporary.exists():
                    yield file, temporary
                    return
                # Another save removed it as a leftover before it was locked. Try again with another name.
        finally:
            temporary.unlink(missing_ok=True)


def _lock(file: int) -> bool | None:
    """Lock a file until it is closed. Return False if another process holds the lock, None if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return None
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed saves to ``path``. Files that cannot be locked are left alone."""
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
    """Give an open file the mode of the file that it replaces, and its owner and group if this process may."""
    mode = stat.S_IMODE(replaced.st_mode) & 0o777
    try:
        os.fchown(file, replaced.st_uid, replaced.st_gid)
    except OSError:
        try:
            os.fchown(file, -1, replaced.st_gid)
        except OSError:
            mode &= ~stat.S_IRWXG  # these rights were another group's
    os.fchmod(file, mode)


def is_pool_file(path: str | os.PathLike) -> bool:
    """Whether a file begins like a pool file; it may be damaged."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Read the header and the arrays of a file into memory.

    The file is not mapped, because this process would crash if somebody truncated a mapped file. The arrays take no
    more memory than the file's size.

    Raises PoolFileError if the file is not a pool, is truncated or corrupted, has another version or exceeds the
    machine's memory; OSError if it cannot be opened or read.
    """
    with open(path, "rb") as file:
        preamble = file.read(_PREAMBLE)
        if not preamble or preamble[: len(MAGIC)] != MAGIC[: len(preamble)]:
            raise PoolFileError(f"{path} is not a pool file")
        if len(preamble) < _PREAMBLE:
            raise PoolFileError(f"{path} is truncated: {len(preamble)} bytes")
        _, version, head_length, length = _FIELDS.unpack_from(preamble)
        if version > VERSION:
            raise PoolFileError(f"{path} has format {version}, newer than {VERSION}, the newest readable one: upgrade")
        if version < VERSION:
            raise PoolFileError(f"{path} has format {version}, which is no longer read: build the pool again")
        size = os.fstat(file.fileno()).st_size
        if size < length:
            raise PoolFileError(f"{path} is truncated: {size} of {length} bytes")
        if size > length:
            raise PoolFileError(f"{path} is corrupted: it has {size} bytes, but its preamble says {length}")
        digest = xxhash.xxh3_128(preamble[: _FIELDS.size])
        head = file.read(min(head_length, _MAX_HEADER))
        digest.update(head)
        try:
            if len(head) < head_length:
                raise ValueError(f"the header's length is {head_length} bytes")
            header, arrays = _parse_header(head, length - _PREAMBLE - head_length)
        except (ValueError, RecursionError, MemoryError) as error:
            raise PoolFileError(f"{path} is corrupted or not of this format: {error}") from error
        for array in arrays.values():
            content = array.reshape(-1).view(np.uint8).data
            file.readinto(content)  # reads less if the file was truncated meanwhile; then the checksum is wrong
            digest.update(content)
    if digest.digest() != preamble[_FIELDS.size :]:
        raise PoolFileError(f"{path} is corrupted: its content does not match its checksum")
    return header, arrays


def _parse_header(head: bytes, nbytes: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the caller's fields, and uninitialised arrays for the ``nbytes`` after the header. Trusts nothing.

    Raises ValueError for a header that `write` would not write; RecursionError for JSON too deep; MemoryError.
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
            raise ValueError("an array has no name, or the name of another array")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError("an array has an unknown dtype")
        if not isinstance(shape, list) or not all(type(side) is int and 0 <= side <= nbytes for side in shape):
            raise ValueError("a shape is not a list of sizes that the file has room for")
        kinds[name] = _DTYPES[dtype], shape
    described = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
    if described != nbytes:
        raise ValueError(f"the file has {nbytes} bytes of arrays, but the header describes {described}")
    check_fits(nbytes)
    return header, {name: np.empty(shape, dtype) for name, (dtype, shape) in kinds.items()}
