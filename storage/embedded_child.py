"""The script between fork and exec of an embedded Postgres: drop privileges, die with the parent, become the server.

The one idea: what has to happen in the child happens in a fresh single-threaded interpreter that then execs, because
Python code after a fork of a process with threads may deadlock. Run by path with `python -I -S`, so it imports only
the standard library. It decides nothing about Postgres: `storage/embedded.py` gives uid, gid and command.

    embedded_child.py UID GID PARENT_PID DIRECTORY COMMAND [ARGUMENT ...]

UID `-` keeps the present user. DIRECTORY is the directory that the command must be able to enter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522

CAPABILITIES = {"CAP_DAC_READ_SEARCH": 2, "CAP_DAC_OVERRIDE": 1}
"""Capabilities tried in this order if the unprivileged user cannot reach the command or DIRECTORY (a project below
/root)."""

CANNOT_RUN = 126


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def become(uid: int, gid: int, capability: str | None) -> None:
    """Switch this process to `uid`/`gid` for good, keeping at most one capability across the exec to come.

    Raise OSError if the system refuses (a user namespace without that uid, a capability that the process does not
    hold).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if capability is not None:
        # Keeps capabilities over setresuid, and later in access(2), by which initdb and postgres find themselves.
        _checked(libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0), "prctl(PR_SET_SECUREBITS)")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if capability is not None:
        number = CAPABILITIES[capability]
        mask = 1 << number
        header = _CapabilityHeader(LINUX_CAPABILITY_VERSION_3, 0)
        sets = (_CapabilitySets * 2)(_CapabilitySets(mask, mask, mask), _CapabilitySets(0, 0, 0))
        _checked(libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")
        _checked(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0), "prctl(PR_CAP_AMBIENT_RAISE)")


def can_run(uid: int, gid: int, capability: str | None, directory: str, command: str) -> bool:
    """Return whether `uid` with `capability` can enter `directory` and execute `command`, found out by doing both."""
    child = os.fork()
    if child == 0:
        try:
            become(uid, gid, capability)
            os.stat(os.path.join(directory, "."))
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.execv(command, [command, "--version"])
        except OSError:
            os._exit(CANNOT_RUN)
    return os.waitpid(child, 0)[1] == 0


def drop_privileges(uid: int, gid: int, directory: str, command: str) -> None:
    """Become `uid` with no capability, or with the least that lets it reach what it must."""
    for capability in (None, *CAPABILITIES):
        if can_run(uid, gid, capability, directory, command):
            if capability is not None:
                print(f"{command} runs as uid {uid} with {capability}: nothing less can reach it", file=sys.stderr)
            become(uid, gid, capability)
            return
    raise PermissionError(f"uid {uid} cannot both enter {directory} and execute {command}")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGINT (Postgres: fast shutdown) when the thread that started this process ends.

    Called after the change of user, which clears the request. Does nothing on a system without prctl.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"the parent {parent_pid} has ended")


def main(arguments: list[str]) -> None:
    uid, gid, parent_pid, directory, *command = arguments
    os.umask(0o077)
    try:
        if uid != "-":
            drop_privileges(int(uid), int(gid), directory, command[0])
        die_with_parent(int(parent_pid))
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main(sys.argv[1:])
