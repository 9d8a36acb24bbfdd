"""Programs that want out."""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest

from lachesis.environment import Invalid
from lachesis.environment_toolkit import sandbox_child
from lachesis.environment_toolkit.sandbox import Limits, Sandbox
from tests.environment_toolkit.conftest import unconfined
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.skipif(
    bool(unconfined()), reason=f"this machine cannot confine a program: {unconfined()}"
)
QUICK = Limits(seconds=10, memory_mib=256)
SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number}, {arguments}), ctypes.get_errno())
"""


async def ran(program, stdin="", limits=QUICK):
    return await Sandbox(limits).run(program, stdin)


def exists(path):
    return os.path.lexists(path)


async def test_a_program_runs_with_the_standard_library():
    found = await ran(
        "import asyncio, collections, decimal, fractions, itertools, json, math, random, re, "
        "statistics, sys\n"
        "asyncio.run(asyncio.sleep(0))\nprint(json.dumps(sorted(sys.stdin.read())))",
        "cab",
    )
    assert (found.how, found.code, found.output) == ("ended", 0, '["a", "b", "c"]\n'), found


@pytest.mark.parametrize(
    ("what", "program", "said"),
    [
        ("reads a file", "open('/etc/passwd').read()", "PermissionError"),
        ("reads its own memory", "open('/proc/self/mem', 'rb')", "PermissionError"),
        (
            "reads what others were started with",
            "open('/proc/1/environ').read()",
            "PermissionError",
        ),
        ("lists a folder", "import os; os.listdir('/tmp')", "PermissionError"),
        ("writes where it stands", "open('x', 'w')", "PermissionError"),
        ("writes elsewhere", "open('/tmp/lachesis-escaped', 'w')", "PermissionError"),
        ("changes the library", "import os; open(os.__file__, 'a')", "PermissionError"),
        (
            "empties a file",
            "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
            "PermissionError",
        ),
        (
            "names its parent for signals",
            "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
            "PermissionError",
        ),
        (
            "wants to be told by signals",
            "import fcntl; fcntl.fcntl(0, fcntl.F_SETFL, 0o20000)",
            "PermissionError",
        ),
        ("removes a file", "import os; os.remove(os.__file__)", "PermissionError"),
        ("makes a folder", "import os; os.mkdir('/tmp/lachesis-escaped')", "PermissionError"),
        (
            "makes a link",
            "import os; os.symlink('/etc', '/tmp/lachesis-escaped')",
            "PermissionError",
        ),
        ("opens a socket", "import socket; socket.socket()", "PermissionError"),
        (
            "asks for a name",
            "import socket; socket.create_connection(('localhost', 80))",
            "gaierror",
        ),
        ("forks", "import os; os.fork()", "PermissionError"),
        (
            "starts a thread",
            "import threading; threading.Thread(target=print).start()",
            "can't start new thread",
        ),
        ("starts a program", "import subprocess; subprocess.run(['/bin/true'])", "PermissionError"),
        ("becomes a program", "import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("kills its parent", "import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("kills everybody", "import os; os.kill(-1, 9)", "PermissionError"),
        ("becomes another user", "import os; os.setuid(0)", "PermissionError"),
        (
            "raises its limits",
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
            "Error",
        ),
        ("makes memory that is a file", "import os; os.memfd_create('x')", "PermissionError"),
        ("asks for priority", "import os; os.nice(-10)", "PermissionError"),
        ("leaves the folder for good", "import os; os.chroot('.')", "PermissionError"),
        ("exhausts the stack", "f = lambda: f()\nf()", "RecursionError"),
        ("is no program", "def f(:", "SyntaxError"),
        ("ends at once", "import os; os._exit(3)", ""),
        ("crashes", "import ctypes; ctypes.string_at(0)", ""),
    ],
    ids=lambda one: (
        one if isinstance(one, str) and " " in one and len(one) < 40 and "(" not in one else ""
    ),
)
async def test_what_a_program_may_not_do_fails(what, program, said):
    found = await ran(program)
    assert found.how == "failed", found
    assert said in found.errors, found.errors
    assert not exists("/tmp/lachesis-escaped")


@pytest.mark.parametrize(
    ("what", "number", "arguments"),
    [
        ("socket", 41, "2, 1, 0"), ("clone", 56, "0, 0"), ("vfork", 58, "0"),
        ("execve", 59, "b'/bin/sh', 0, 0"),
        ("kill", 62, "1, 9"), ("ptrace", 101, "16, 1, 0, 0"), ("mount", 165, "0, 0, 0, 0, 0"),
        ("unshare", 272, "0x10000000"),
        ("process_vm_readv", 310, "1, 0, 0, 0, 0, 0"), ("bpf", 321, "0, 0, 0"),
        ("io_uring_setup", 425, "1, 0"),
        ("pidfd_open", 434, "1, 0"), ("prctl", 157, "38, 0"), ("seccomp", 317, "0, 0, 0"),
        ("keyctl", 250, "0, 0"),
        ("socket of 32 bits", 0x40000000 + 41, "2, 1, 0"),
    ],
    ids=lambda one: one if isinstance(one, str) and not one[0].isdigit() and "," not in one else "",
)  # fmt: skip
@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the numbers of calls are those of x86_64"
)
async def test_the_kernel_itself_refuses(what, number, arguments):
    found = await ran(SYSCALL.format(number=number, arguments=arguments))
    assert found.output.split() == ["-1", "1"], f"{what}: EPERM was expected, not {found}"


async def test_a_hundred_gigabytes_are_not_to_be_had():
    assert (await ran("x = bytearray(100 * 2**30)")).how == "out of memory"
    assert (await ran("x = []\nwhile True: x.append(bytearray(2**20))")).how == "out of memory"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
async def test_what_never_ends_is_ended(program):
    found = await ran(program, limits=Limits(seconds=0.5))
    assert (found.how, found.code < 0) == ("timed out", True), found
    assert found.seconds < 5


async def test_what_waits_for_a_processor_is_not_the_programs_time():
    """Eight that think at once on one core, each for less than a quarter of its limit."""
    sandbox = Sandbox(Limits(seconds=1.5), max_concurrent=8)
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    try:
        found = await asyncio.gather(*(sandbox.run(code) for _ in range(8)))
    finally:
        os.sched_setaffinity(0, before)
    assert [(one.how, one.output) for one in found] == [("ended", "done\n")] * 8


def jailed_programs():
    """Return the processes in which this process runs programs."""
    programs = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sandbox_child.py" in " ".join(child.cmdline()):
                programs.append(child)
    return programs


async def test_a_program_that_somebody_kills_is_not_to_blame():
    running = asyncio.ensure_future(ran("import time; print('up', flush=True); time.sleep(9)"))
    programs = await asyncio.to_thread(wait_until, jailed_programs, 20, "a program that runs")
    programs[0].kill()
    with pytest.raises(Invalid, match="another process of this machine killed the program"):
        await running


async def test_a_program_killed_before_it_begins_is_not_to_blame(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr("lachesis.environment_toolkit.sandbox.CHILD_FILE", tmp_path / "killed.py")
    with pytest.raises(Invalid, match="another process of this machine killed the program"):
        await ran("print(1)")


async def test_output_has_a_limit():
    found = await ran(
        "while True: print('x' * 1000)", limits=Limits(seconds=10, output_bytes=10_000)
    )
    assert (found.how, found.output) == ("too much output", "")


async def test_nothing_of_this_process_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_OF_TEST", "tml-1234")
    found = await ran("import os; print(dict(os.environ)); print(os.getcwd())")
    assert "tml-1234" not in found.output
    folder = Path(found.output.splitlines()[-1])
    assert folder.name.startswith("lachesis-jail-")
    assert not exists(folder), "it is gone with the program"


async def test_programs_run_side_by_side():
    sandbox = Sandbox(QUICK, max_concurrent=4)
    found = await asyncio.gather(
        *(sandbox.run("print(input())", str(number)) for number in range(12))
    )
    assert [one.output for one in found] == [f"{number}\n" for number in range(12)]


async def test_a_machine_that_cannot_confine_runs_nothing(monkeypatch, tmp_path):
    """As on a kernel without Landlock: the first call has another number, which does not exist."""
    names = "CREATE_RULESET, ADD_RULE, RESTRICT_SELF = "
    changed = Path(sandbox_child.__file__).read_text().replace(f"{names}444", f"{names}9999")  # noqa: ASYNC240
    (tmp_path / "child.py").write_text(changed)
    monkeypatch.setattr("lachesis.environment_toolkit.sandbox.CHILD_FILE", tmp_path / "child.py")
    with pytest.raises(
        Invalid, match="this machine cannot confine a program: Function not implemented: Landlock"
    ):
        await ran("print('free')")
