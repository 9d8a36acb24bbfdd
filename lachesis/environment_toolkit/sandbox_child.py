"""Give up all rights that a program does not need to compute, then run the program.

`lachesis.environment_toolkit.sandbox` runs this file by its name in an isolated interpreter, so it
uses the standard library only. The first line of the standard input is JSON with the limits, the
program and the program's own standard input. The kernel takes these rights away permanently:

    files       Landlock: nothing can be written, and only Python's library can be read
    network, processes, signals, mounts
                seccomp: a system call that is not in `ALLOWED` fails with EPERM; socket, fork and
                exec are not in it
    memory, processor time, open files, file sizes
                resource limits
    privileges  capabilities are dropped, also for root

Sources: landlock(7), seccomp(2), linux/landlock.h, linux/filter.h, asm/unistd.h (x86_64) and
asm-generic/unistd.h (aarch64).
"""

import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

# Exit code when the kernel refused a restriction; the program was not run.
EXIT_UNCONFINED = 97
# Written before the program starts; its time limit counts from here.
STARTED = b"\x06"
LIBC = ctypes.CDLL(None, use_errno=True)

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
READ_FILE, READ_DIR = 1 << 2, 1 << 3
# Number of file rights by version of Landlock's ABI; later versions have as many as version 5.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
CAPABILITIES_V3 = 0x20080522

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = {  # name: number on x86_64, number on aarch64; -1 where there is none
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1),
    "poll": (7, -1), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "readv": (19, 65),
    "writev": (20, 66), "access": (21, -1), "pipe": (22, -1), "select": (23, -1),
    "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, -1), "nanosleep": (35, 101),
    "getpid": (39, 172),
    "socketpair": (53, 199), "exit": (60, 93), "uname": (63, 160), "getdents": (78, -1),
    "getcwd": (79, 17),
    "readlink": (89, -1), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "epoll_create": (213, -1), "getdents64": (217, 61), "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, -1),
    "epoll_ctl": (233, 21),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59), "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
OPEN, OPENAT, FCNTL, IOCTL, CLONE3 = (2, -1), (257, 56), (72, 25), (16, 29), (435, 435)
# Flags of open: O_WRONLY or O_RDWR, O_CREAT, and O_TRUNC, which empties a file opened for reading.
#
# Landlock has no right for truncation before Linux 6.2.
WRITE_FLAGS = 0o3 | 0o100 | 0o1000
# Allowed commands of fcntl.
#
# F_SETOWN is not allowed: it chooses the process that gets a signal when a file is readable, which
# can be used to kill others. Landlock does not prevent that before Linux 6.12.
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
FCNTL_COMMANDS = (F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC)
TCGETS, FIONBIO, FIOCLEX = 0x5401, 0x5421, 0x5451
# Allowed commands of ioctl: is this a terminal, do not block, close at exec. Python uses them for
# its own files.
IOCTL_COMMANDS = (TCGETS, FIONBIO, FIOCLEX)
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
# Offsets of the lower halves of a system call's arguments.
ARGUMENT_OFFSETS = (16, 24, 32)
ALLOW, FAIL = 0x7FFF0000, 0x00050000
EPERM, EACCES, ENOSYS = 1, 13, 38


def main() -> None:
    """Read the request, give up all rights, and run the program."""
    request = json.loads(sys.stdin.buffer.readline())
    try:
        _set_resource_limits(request)
        _restrict_files(readable=_list_library_folders())
        _drop_capabilities()
        _filter_system_calls()
    except OSError as error:
        print(f"{error.strerror}: {error.filename}", file=sys.stderr)
        os._exit(EXIT_UNCONFINED)
    os.write(1, STARTED)
    sys.stdin = io.StringIO(request["stdin"])
    sys.argv = ["program"]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    exec(compile(request["program"], "program", "exec"), module.__dict__)


def _set_resource_limits(request: dict[str, Any]) -> None:
    """Limit memory, processor time, files and descriptors of this process."""
    seconds = max(1, int(request["cpu_s"] + 0.999))
    limits = {
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU)))


def _list_library_folders() -> list[str]:
    """Return the folders of Python's own modules."""
    folders = [os.path.dirname(os.__file__), *(path for path in sys.path if "lib-dynload" in path)]
    return [path for path in dict.fromkeys(map(os.path.realpath, folders)) if os.path.isdir(path)]


def _check_result(call_name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), call_name)
    return result


def _restrict_files(readable: list[str]) -> None:
    """Let the process read files below these folders and nothing else, with Landlock."""
    abi_version = _check_result("Landlock", LIBC.syscall(CREATE_RULESET, None, 0, 1))
    rights = (1 << FILE_RIGHTS.get(abi_version, 16)) - 1
    tcp = 0b11 if abi_version >= 4 else 0
    scoped = 0b11 if abi_version >= 6 else 0  # Abstract sockets and signals.
    attributes = struct.pack("=QQQ", rights, tcp, scoped)[
        : 8 if abi_version < 4 else 16 if abi_version < 6 else 24
    ]
    ruleset_fd = _check_result(
        "Landlock", LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    )
    for folder in readable:
        folder_fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR, folder_fd)
        _check_result("Landlock", LIBC.syscall(ADD_RULE, ruleset_fd, 1, rule, 0))
        os.close(folder_fd)
    _check_result("no_new_privs", LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check_result("Landlock", LIBC.syscall(RESTRICT_SELF, ruleset_fd, 0))
    os.close(ruleset_fd)


def _drop_capabilities() -> None:
    header, no_capabilities = struct.pack("=Ii", CAPABILITIES_V3, 0), bytes(24)
    _check_result("capset", LIBC.capset(header, no_capabilities))


def _filter_system_calls() -> None:
    """Allow the listed system calls and let all others fail, with seccomp.

    Files can be opened for reading only, and a few commands of fcntl and ioctl are allowed. clone3
    is reported as missing, so that the C library falls back to clone, which fails.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, os.strerror(ENOSYS), f"no filter for {machine}")
    instructions = _make_filter(machine)
    packed = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    )
    # The kernel reads a length, padding to the size of a pointer, and the instructions' address.
    program = ctypes.create_string_buffer(
        struct.pack("@HxxxxxxP", len(instructions), ctypes.addressof(packed))
    )
    _check_result("seccomp", LIBC.prctl(SET_SECCOMP, FILTER, program, 0, 0))


def _make_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the program of the filter in BPF.

    An instruction is an operation, how many instructions to skip if it is true and if it is false,
    and an operand.
    """
    column = list(ARCHITECTURES).index(machine)
    numbers = [pair[column] for pair in ALLOWED.values() if pair[column] >= 0]
    # A call of another architecture (x32, i386) would have other numbers, so it fails first.
    instructions = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, FAIL | EPERM),
        (LOAD, 0, 0, 0),
    ]
    for number in numbers:
        instructions += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    instructions += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | ENOSYS)]
    for pair, argument in ((OPEN, 1), (OPENAT, 2)):
        if pair[column] >= 0:
            instructions += [
                (EQUAL, 0, 4, pair[column]),
                (LOAD, 0, 0, ARGUMENT_OFFSETS[argument]),
                (ANY_BIT, 0, 1, WRITE_FLAGS),
            ]
            instructions += [(RETURN, 0, 0, FAIL | EACCES), (RETURN, 0, 0, ALLOW)]
    for pair, commands in ((FCNTL, FCNTL_COMMANDS), (IOCTL, IOCTL_COMMANDS)):
        instructions += [
            (EQUAL, 0, 2 + 2 * len(commands), pair[column]),
            (LOAD, 0, 0, ARGUMENT_OFFSETS[1]),
        ]
        for command in commands:
            instructions += [(EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
        instructions += [(RETURN, 0, 0, FAIL | EPERM)]
    return [*instructions, (RETURN, 0, 0, FAIL | EPERM)]


if __name__ == "__main__":
    main()
