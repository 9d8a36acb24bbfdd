"""Note each file that this process opens or replaces, for `bench/launch_walk.py`.

Python imports this module at its start if its folder is in PYTHONPATH. The notes go to the folder
`notes` beside it: a file per process, with its command line in the first line, then a line per
event.
"""

import os
import sys
import time

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "notes")
WRITING = os.O_WRONLY | os.O_RDWR
synced = set()


def note(kind: str, text: str) -> None:
    """Append a line: seconds since the epoch, the kind of event, and the file."""
    line = f"{time.time():f}\t{kind}\t{text}\n".encode()
    # The process may be a fork of the one that imported this module.
    file = os.open(f"{FOLDER}/{os.getpid()}.tsv", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line)
    os.close(file)


def hear(event: str, values: tuple) -> None:
    """Note an opened file, and a file that was replaced by a synced one."""
    if event == "open" and isinstance(values[0], str) and not values[0].startswith(FOLDER):
        flags = values[2] if isinstance(values[2], int) else 0
        note("write" if flags & WRITING else "read", os.path.abspath(values[0]))
    elif event == "os.rename":
        source, target = (os.path.abspath(os.fsdecode(path)) for path in values[:2])
        if source in synced:
            synced.discard(source)
            note("synced", target)


def sync(file, original=os.fsync) -> None:
    """Sync a file and remember its name, which is that of a temporary file as a rule."""
    original(file)
    number = file if isinstance(file, int) else file.fileno()
    synced.add(os.readlink(f"/proc/self/fd/{number}"))


if os.path.isdir(FOLDER):
    with open("/proc/self/cmdline", "rb") as command:
        note(
            "start",
            " ".join(command.read().decode(errors="replace").split("\0")).replace("\n", " "),
        )
    os.fsync = sync
    sys.addaudithook(hear)
