"""The last line of a job of torchrun that has failed: why, and not only that it has.

When a rank ends with a status, torchrun prints a traceback of its own and a box with the status,
after all that ranks have said. So the first rank of a machine that fails puts its line into the box
(torchrun reads it from a file), and leaves a process that says it again when torchrun has ended.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FILE = "TORCHELASTIC_ERROR_FILE"
_SAID = "hp-train-has-told"
_MOST_SECONDS = 120
_SAY = f"""
import select, sys
poll = select.poll()
poll.register(int(sys.argv[1]), select.POLLIN)
if poll.poll({_MOST_SECONDS} * 1000):
    sys.stderr.write(sys.argv[2] + "\\n")
"""


def leave_last_word(
    line: str, *, is_final: bool = False, env: Mapping[str, str] = os.environ
) -> None:
    """Have a line said after torchrun's own, by the first rank of this machine that asks for it.

    Args:
        line: What is to be read last.
        is_final: Whether torchrun ends even though it might start the ranks again.
        env: Environment of a rank; without torchrun nothing is done.
    """
    path = env.get(_FILE)
    restarts, most = (env.get(f"TORCHELASTIC_{x}", "0") for x in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not path or not (is_final or restarts == most):
        return
    told = {
        "message": line,
        "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))},
    }
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": told}))
        # The folder of all ranks of this start on this machine.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        os.close(os.open(Path(path).parent.parent / _SAID, flags, 0o600))
        agent = os.pidfd_open(os.getppid())
        subprocess.Popen(  # noqa: S603 - a line of Python that waits
            [sys.executable, "-I", "-S", "-c", _SAY, str(agent), line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[agent],
            start_new_session=True,
        )
        os.close(agent)
