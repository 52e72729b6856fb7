"""Sockets of multiprocessing in a folder for temporary files, however long its path is."""

import os
import tempfile
from multiprocessing import util

_LONGEST = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes that the path of a Unix socket may have, without what multiprocessing adds."""


def short_temporary_folder() -> None:
    """Let multiprocessing's folder of this process have a path that a socket can be bound to.

    The descriptor of the folder, by which its path is short, stays open as long as this process.

    Raises:
        OSError: When there is no folder for temporary files.
    """
    found = tempfile.gettempdir()
    if len(os.fsencode(found)) <= _LONGEST:
        return
    short = f"/proc/self/fd/{os.open(found, os.O_RDONLY | os.O_DIRECTORY)}"
    tempfile.tempdir = short
    try:
        util.get_temp_dir()  # which is kept from then on
    finally:
        tempfile.tempdir = found
