"""The fences around compute: what a process gives up for good, by calls to the kernel, each on its own.

Each fence says whether it holds; one that this system does not have is named, and the others hold without it.
`close_early` comes first, while the process has one thread and nothing of others: Landlock binds only the
thread that asks for it and those it starts. `close_late` comes when torch is loaded, before the first frame
of others. The numbers are those of Linux on x86-64 and ARM64. Only the standard library is loaded here.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every machine
_LANDLOCK_VERSION, _PATH_BENEATH, _O_PATH = 1, 1, 0o10000000
_SCOPES = 0b11  # no abstract sockets of others, no signals to them
# Rights to files, as the kernel numbers them, and the version of Landlock from which it knows them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _TRUNCATE = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 14
_REFER = 1 << 13  # to rename from one of its folders to another
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: 1 << 15}
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NET_RIGHTS = 0b11  # bind and connect by TCP
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = (
    _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE | _REFER
)  # no links

_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store")
_SYSTEM_FILES = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/os-release"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/proc/sys/kernel"),
    *("/proc/filesystems", "/proc/version", "/sys", "/dev/urandom", "/dev/random", "/dev/zero"),
)
_DEVICE_FILES = ("/dev/null",)
_PACKAGE = Path(__file__).resolve().parents[1]

# System calls by machine: x86-64, ARM64. Those by which another program, or a copy of this one, could be left
# behind come apart: the agent ends all of the session.
_CALLS = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),  # it could open sockets past this filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
}
_PROGRAM_CALLS = {"execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154)}
_MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, arch, seccomp
_X32_BIT = 0x40000000
_SET_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_MOST_FILES, _MOST_PROCESSES = 4096, 512


@dataclass(frozen=True, slots=True)
class Fence:
    """What a process cannot do any more; without `holds`, `why` says why it can."""

    name: str
    holds: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class FenceWishes:
    """What compute must still be able to do: write in folders, start programs, use a GPU."""

    agent: int  # its process
    home: str = ""  # the agent's, which is never read as a whole
    write: tuple[str, ...] = ()
    starts_programs: bool = False  # the compiler does
    uses_gpu: bool = False


ENDS_WITH_AGENT = "ends with the agent"
NO_NEW_RIGHTS = "no new rights"
NO_CORE = "no core file"
FILES = "files: only its own and the system's libraries"
MEMORY = "memory: what is lent"
CALLS = "no network, no look into other processes"
PROGRAMS = "starts no program"
COUNTS = "number of open files"
_ON_GPU = "a GPU's driver needs it"


def find_read_folders(home: str) -> tuple[str, ...]:
    """Return the folders from which this process loads modules; none that a home lies in."""
    package, around = str(_PACKAGE), str(_PACKAGE.parent)
    known = (
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *sys.path,
        os.path.dirname(sys.executable),
        package,
    )
    folders = [package if each == around else each for each in known if each and os.path.exists(each)]
    found = dict.fromkeys(str(Path(each).resolve()) for each in folders)
    return tuple(each for each in found if not (home and Path(home).is_relative_to(each)))


def close_early(wishes: FenceWishes) -> list[Fence]:
    """Close what needs nothing to be loaded; the process must have one thread."""
    return [
        _try(ENDS_WITH_AGENT, lambda: _end_with(wishes.agent)),
        _try(NO_NEW_RIGHTS, lambda: _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        _try(NO_CORE, lambda: _limit("RLIMIT_CORE", 0)),
        _try(COUNTS, lambda: _limit("RLIMIT_NOFILE", _MOST_FILES)),
        Fence(FILES, False, _ON_GPU) if wishes.uses_gpu else _try(FILES, lambda: _close_files(wishes)),
    ]


def close_late(wishes: FenceWishes, lent_bytes: float) -> list[Fence]:
    """Close the rest; beside what the process takes now it gets so many bytes."""
    fences = [
        Fence(MEMORY, False, _ON_GPU) if wishes.uses_gpu else _try(MEMORY, lambda: _limit_memory(lent_bytes)),
        _try(CALLS, lambda: _close_calls(_CALLS, "any" if not wishes.uses_gpu else "internet")),
    ]
    if wishes.starts_programs:
        return [*fences, Fence(PROGRAMS, False, "the compiler does")]
    if wishes.uses_gpu:
        return [*fences, Fence(PROGRAMS, False, _ON_GPU)]
    return [*fences, _try(PROGRAMS, lambda: _close_calls(_PROGRAM_CALLS, "any"))]


def _try(name: str, close: Callable[[], object]) -> Fence:
    if sys.platform != "linux":
        return Fence(name, False, f"{platform.system() or sys.platform} does not have it")
    try:
        close()
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Fence(name, False, f"this system refuses it: {reason}")
    return Fence(name, True)


def _call(name: str, *given: int | ctypes.c_void_p) -> int:
    """Call a function of the C library; OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    arguments = [each if isinstance(each, ctypes.c_void_p) else ctypes.c_ulong(each) for each in given]
    function = getattr(library, name)
    function.restype = ctypes.c_long
    found = int(function(*arguments))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _address(buffer: ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
    return ctypes.cast(buffer, ctypes.c_void_p)


def _end_with(agent: int) -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:  # it died before
        os._exit(1)


def _limit(name: str, most: int) -> None:
    import resource

    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (lowest, lowest))


def _limit_memory(lent_bytes: float) -> None:
    """Bound what the process can write to: what it has now, and what is lent. Libraries do not count."""
    facts = Path("/proc/self/status").read_text().splitlines()
    (taken,) = (int(line.split()[1]) << 10 for line in facts if line.startswith("VmData:"))
    _limit("RLIMIT_DATA", int(taken + lent_bytes))


def landlock_version() -> int:
    """Return the version of Landlock here; OSError if there is none."""
    return _call("syscall", _LANDLOCK_CREATE, 0, 0, _LANDLOCK_VERSION)


def _close_files(wishes: FenceWishes) -> None:
    version = landlock_version()
    known = 0
    for least, rights in _ALL_RIGHTS.items():
        known |= rights if version >= least else 0
    # What a version does not know it must not be asked for; a shorter record leaves it out.
    record = struct.pack("<QQQ", known, _NET_RIGHTS, _SCOPES)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call("syscall", _LANDLOCK_CREATE, _address(ctypes.create_string_buffer(record)), size, 0)
    try:
        for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES, *find_read_folders(wishes.home)):
            _allow(rules, path, _READ & known)
        for path in (*_DEVICE_FILES, *wishes.write):
            _allow(rules, path, _WRITE & known)
        _call("syscall", _LANDLOCK_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    """Allow what lies under a path. Its descriptor stays open for good: a rule is of an inode, and under
    /proc the kernel makes another one for a file that it forgot for want of memory."""
    try:
        descriptor = os.open(path, _O_PATH | os.O_CLOEXEC)
    except OSError:  # this system has none
        return
    if not os.path.isdir(path):
        rights &= _OF_FILES
    record = ctypes.create_string_buffer(struct.pack("<Qi", rights, descriptor))
    _call("syscall", _LANDLOCK_ADD, rules, _PATH_BENEATH, _address(record), 0)


def _close_calls(calls: dict[str, tuple[int, int]], sockets: str) -> None:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"the calls of {machine} are not known here")
    column, arch, number = _MACHINES[machine]
    refused = [numbers[column] for name, numbers in calls.items() if name != "socket" or sockets == "any"]
    if sockets == "internet":
        # A driver talks to its own service on this PC; connecting is harmless without such a socket.
        reached = [calls[name][column] for name in ("connect", "bind", "listen", "accept", "accept4")]
        refused = [each for each in refused if each not in reached]
    program = make_filter(arch, refused, calls["socket"][column] if sockets == "internet" else None)
    code = ctypes.create_string_buffer(b"".join(program))
    record = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    given = _address(ctypes.create_string_buffer(record))
    _call("syscall", number, _SET_FILTER, _ALL_THREADS, given)


def make_filter(arch: int, refused: Sequence[int], socket_call: int | None = None) -> list[bytes]:
    """Return the program by which the kernel judges each call; with `socket_call` local sockets are left."""
    checks: list[tuple[int, int]] = [(_AT_LEAST, _X32_BIT), *((_EQUAL, number) for number in refused)]
    tail: list[bytes] = [_step(_RETURN, _ALLOW), _step(_RETURN, _REFUSE)]
    if socket_call is not None:
        # if it is a socket and not a local one (AF_UNIX is 1), refuse it
        is_local = [_step(_LOAD, 16), _step(_EQUAL, 1, 0, 1)]
        tail = [_step(_EQUAL, socket_call, 0, len(is_local)), *is_local, *tail]
    steps = [_step(_LOAD, 4), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _REFUSE), _step(_LOAD, 0)]
    for index, (kind, number) in enumerate(checks):
        to_refusal = len(checks) - index - 1 + len(tail) - 1
        steps.append(_step(kind, number, to_refusal, 0))
    return steps + tail


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def describe_fences(fences: Iterable[Fence]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the fences that hold, and the others with their reasons."""
    known = tuple(fences)
    held = tuple(each.name for each in known if each.holds)
    return held, tuple(f"{each.name} ({each.why})" for each in known if not each.holds)
