"""Pool files: one preamble, one header, then arrays.

magic "NGRMPOOL" | version, uint32 | length of the header, uint32 | length of the file, uint64
    | xxh3-128 of the fields before it and of all that follows, 16 bytes
header, JSON: the caller's fields; "arrays": name, dtype, shape of each
arrays, in the header's order
"""

import json
import math
import mmap
import os
import secrets
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

MAGIC = b"NGRMPOOL"
VERSION = 2  # to be raised with any change of the arrays, of the hashing or of the kinds of contexts
_FIELDS = struct.Struct("<8sIIQ")
_PREAMBLE = _FIELDS.size + 16


class PoolFileError(ValueError):
    """A file that is no pool of this version and vocabulary, or not a whole one."""


def write(path: str | os.PathLike, header: dict, arrays: dict[str, np.ndarray]) -> None:
    """Replace ``path`` atomically: a temporary file beside it is written, synced to disk and renamed."""
    path = Path(os.path.realpath(path))  # a link stays a link
    described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": described}).encode()
    parts = [head, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values())]
    size = _PREAMBLE + sum(len(part) for part in parts)
    fields = _FIELDS.pack(MAGIC, VERSION, len(head), size)
    digest = xxhash.xxh3_128(fields)
    for part in parts:
        digest.update(part)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # no one else's, be it another thread's or machine's
    try:
        with open(temporary, "xb") as file:
            file.write(fields + digest.digest())
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # make the rename durable too, where the system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_pool_file(path: str | os.PathLike) -> bool:
    """Whether a file begins as pool files do, whole or not."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: str | os.PathLike) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of a file, read into memory.

    Arrays mapped copy-on-write would be there sooner, but a pool that learns pays as much in page faults on its first
    text, and a file written to in place would take the process down.

    Raises PoolFileError if it is not one, truncated, corrupted or of another version; OSError if it cannot be opened.
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
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    digest = xxhash.xxh3_128(preamble[: _FIELDS.size])
    digest.update(memoryview(mapped)[_PREAMBLE:])
    if size > length or digest.digest() != preamble[_FIELDS.size :]:
        raise PoolFileError(f"{path} is corrupted: its content does not match its checksum")
    try:
        header = json.loads(mapped[_PREAMBLE : _PREAMBLE + head_length])
        arrays = {}
        offset = _PREAMBLE + head_length
        for name, dtype, shape in header.pop("arrays"):
            arrays[name] = np.frombuffer(mapped, dtype, math.prod(shape), offset).reshape(shape).copy()
            offset += arrays[name].nbytes
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PoolFileError(f"{path} is whole, but not of this format: {error}") from error
    return header, arrays
