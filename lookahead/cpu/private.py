"""Files that only the user of this process can have written.

Folders and files are checked after they are opened. So nobody can replace them between the check and the use, and it
does not matter who may write to the folders above them.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder, make it if it is missing, and set its mode to 0700. Yields its descriptor.

    Raises PermissionError as `opened` does, and OSError if the folder cannot be made or opened.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = _opened(str(path), None, os.O_DIRECTORY)
    try:
        if os.fstat(folder).st_mode & 0o777 != 0o700:
            os.fchmod(folder, 0o700)
        yield folder
    finally:
        os.close(folder)


def opened(name: str, folder: int) -> int:
    """Open a file in an opened folder for reading. Returns its descriptor, which the caller closes.

    Raises PermissionError if it belongs to another user, others may write to it, or it is a symbolic link, and OSError
    if it is missing or cannot be opened.
    """
    return _opened(name, folder, os.O_NONBLOCK)  # do not wait if it is a pipe


def write(name: str, content: bytes, folder: int) -> None:
    """Write a file of an opened folder, as a whole or not at all. It replaces a file of the same name."""
    new = f"{name}.{secrets.token_hex(8)}"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        raise


def _opened(name: str, folder: int | None, flags: int) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(f"{name} is a symbolic link, or not a folder") from None
        raise
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        why = f"{name} belongs to user {found.st_uid}, but this process to user {os.geteuid()}"
    elif found.st_mode & 0o022:
        why = f"other users may write to {name} (mode {found.st_mode & 0o777:04o})"
    else:
        return descriptor
    os.close(descriptor)
    raise PermissionError(why)
