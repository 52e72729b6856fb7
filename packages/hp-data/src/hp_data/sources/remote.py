"""Files in object storage, by the libraries of `fsspec` for it."""

from typing import Any, TypeAlias

from hp_base.errors import DataError
from hp_data.sources.source import Opened, extra, printable, why

_EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_FileSystem: TypeAlias = Any
"""A file system of fsspec, whose types this package does not depend on."""


class _RemoteFile:
    """An object, as `Opened`."""

    def __init__(self, system: _FileSystem, path: str, size: int) -> None:
        self._system, self._path, self.size = system, path, size

    def reaches(self, at: int) -> bool:
        return at < self.size

    def span(self, begin: int, end: int) -> bytes:
        end = min(end, self.size)
        if end <= begin:
            return b""
        try:
            data: bytes = self._system.cat_file(self._path, start=begin, end=end)
        except Exception as error:  # noqa: BLE001 - libraries of clouds raise what they like
            raise _refused(self._path, error) from None
        return data


def _system_of(path: str) -> _FileSystem:
    """Return the file system of an address.

    Raises:
        DataError: If it is of no kind that is known, or its library is not installed.
    """
    protocol = path.partition("://")[0]
    if protocol not in _EXTRAS:
        known = ", ".join(f"{name}://" for name in _EXTRAS)
        raise DataError(f"data.paths: {printable(path)} must be a path, or begin with {known}")
    extra(_EXTRAS[protocol], protocol, path)
    return extra("fsspec", protocol, path).filesystem(protocol)


def opened(path: str, size: int | None) -> Opened:
    """Return the bytes of an object.

    Args:
        path: Address of the object.
        size: Bytes of it that are read; None: all.

    Raises:
        DataError: If it cannot be read.
    """
    system = _system_of(path)
    if size is None:
        try:
            size = int(system.info(path)["size"])
        except Exception as error:  # noqa: BLE001 - likewise
            raise _refused(path, error) from None
    return _RemoteFile(system, path, size)


def exists(path: str) -> bool:
    """Tell whether there is an object at an address.

    Raises:
        DataError: If its storage cannot be asked.
    """
    try:
        return bool(_system_of(path).exists(path))
    except Exception as error:  # noqa: BLE001 - likewise
        raise _refused(path, error) from None


def sizes_below(path: str) -> dict[str, int]:
    """Return the size of every object that an address, a folder or a pattern names, by address.

    Raises:
        DataError: If there is none, or it cannot be read.
    """
    system, protocol = _system_of(path), path.partition("://")[0]
    try:
        names = system.glob(path) if any(c in path for c in "*?[") else [path]
        found: dict[str, int] = {}
        for name in names:
            for each, about in system.find(name, detail=True).items():
                if about["type"] == "file":
                    found[f"{protocol}://{each.removeprefix(f'{protocol}://')}"] = int(
                        about["size"]
                    )
    except Exception as error:  # noqa: BLE001 - likewise
        raise _refused(path, error) from None
    if not found:
        raise DataError(f"data.paths: {printable(path)} must exist")
    return dict(sorted(found.items()))


def _refused(path: str, error: Exception) -> DataError:
    return DataError(f"data.paths: cannot read {printable(path)}: {why(error)}")
