"""A real Postgres server run as our own child, for `sluice serve` without a database URL and for the tests.

The one idea: the server lives exactly as long as this process and belongs to it alone. A lock on the data directory
keeps a second process out. The kernel interrupts the server when we die, however we die. If the server of a killed
predecessor is still shutting down, we wait for its end and then start our own child. A server that dies under us is
started again with back-off. So there is one state to reason about: our child, or none.

`postgres_programs.py` finds the binaries: those of an optional wheel, or the system's. The server listens on a Unix
socket in a private directory only. Postgres refuses uid 0, so as root the server runs as the owner of an existing
cluster, else as the system user `sluice`, which is created if it does not exist: initdb wants a uid with a name, and
the other names that every system has are shared with other services. No directory above the data is changed. Writes of
this process below the server's directories go through `private_files.py`, because their owner may plant symlinks there.

It does not migrate, pool or know any table.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from storage.embedded_account import Account, own_account
from storage.embedded_settings import SERVER_SETTINGS, configuration
from storage.embedded_socket import LOCK_NAME, SOCKET_NAME, USER, running_url, socket_directory, socket_url
from storage.errors import StorageError
from storage.postgres_programs import EmbeddedPostgresError, Programs, fatal_line, find_programs, last_line
from storage.private_files import (
    give_tree,
    make_directory,
    open_lock,
    opened_directory,
    read_file,
    restrict_directory,
    sync_directory,
    write_file,
)

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

CLUSTER = "postgres"
"""Name of the cluster's directory."""
INITDB_SECONDS = 120.0
START_SECONDS = 300.0
"""Limit for the time of one start. Crash recovery replays at most `max_wal_size` of WAL."""
LEFTOVER_FAST_SECONDS = 60.0
"""How long a server of a killed predecessor may take for its own fast shutdown."""
POLL_SECONDS = 0.01
FIRST_BACKOFF_SECONDS = 0.05
STEADY_SECONDS = 60.0
"""If a server ran for this long before it died, the next start uses the first, shortest back-off."""
MAX_SMALL_FILE_BYTES = 4096
"""Largest size of PG_VERSION and postmaster.pid that is read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for a server's shutdown, restarts and log."""

    stop_fast_s: float = 1.5
    """How long a fast shutdown may take. An immediate shutdown follows: it loses nothing durable, and the next start
    recovers."""
    stop_immediate_s: float = 0.5
    last_backoff_s: float = 5.0
    """Longest pause before a server that died is started again."""
    log_check_s: float = 30.0
    max_log_bytes: int = 8 * 1024 * 1024


BOUNDS = Bounds()


def holds_cluster(data_dir: Path) -> bool:
    """Return whether the data directory holds a cluster, including one whose change of owner is incomplete. Raise
    StorageError if the directory cannot be read."""
    directory = data_dir.expanduser().absolute()
    try:
        return os.path.lexists(directory / CLUSTER) or any(directory.glob(f"{CLUSTER}.from-*"))
    except OSError as error:
        raise StorageError(f"cannot look into {directory}: {error.strerror}") from error


class EmbeddedPostgres:
    """One Postgres cluster below `data_dir`, served while started.

    `data_dir` holds `postgres/` (the cluster), `socket/`, `postgres.log`, `sluice.lock`. `start` and `stop` must run
    on the same event loop, on a thread that outlives the server: the kernel ties the server to that thread.
    """

    def __init__(
        self,
        data_dir: Path,
        connections: int = 0,
        *,
        programs: Path | None = None,
        settings: Mapping[str, str] | None = None,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """Prepare the server.

        `connections` is how many must fit at once; there is always room for a hundred. `programs` is the directory of
        Postgres' programs, see `find_programs`. `settings` win over SERVER_SETTINGS.
        """
        self.data_dir = data_dir.expanduser().absolute()
        self.cluster_dir = self.data_dir / CLUSTER
        self.log_path = self.data_dir / "postgres.log"
        self.restarts = 0
        """Number of times that the server died and was started again."""
        self._connections = connections
        self._bounds = bounds
        self._given_programs = programs
        self._programs: Programs | None = None
        self._settings = {**SERVER_SETTINGS, **(settings or {})}
        self._account: Account | None = None
        self._socket_dir = self.data_dir / "socket"
        self._lock_path = self.data_dir / LOCK_NAME
        self._lock_fd: int | None = None
        self._is_ours = False
        """True if we or an earlier run created the data directory or served from it."""
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._launched_at = 0.0
        self._log_start_bytes = 0
        self._log_is_too_long = False
        """True if the log was too long and could not be cut."""

    @property
    def url(self) -> str:
        """URL of the server's database, for asyncpg."""
        return socket_url(self._socket_dir)

    @property
    def pid(self) -> int | None:
        """Process id of the running postmaster."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> str:
        """Start the server, creating the cluster at the first time, and return `url`.

        Raise EmbeddedPostgresError if another process holds the directory or the server cannot run.
        """
        try:
            self._programs = await asyncio.to_thread(find_programs, self._given_programs)
            self._take_lock()
            await self._choose_account()
            self._restrict_data_dir()
            self._prepare_socket_dir()
            if not self._has_cluster():
                await self._stop_leftover()
                await self._initdb()
            self._check_cluster()
            await self._launch()
        except OSError as error:
            await self._abandon()
            raise EmbeddedPostgresError(f"cannot run Postgres in {self.data_dir}: {error}") from error
        except BaseException:
            await self._abandon()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="embedded-postgres")
        return self.url

    async def stop(self) -> None:
        """Stop the server by a fast shutdown, or an immediate one after `stop_fast_s`; then release the
        directory."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        await self._stop_child()
        self._release_lock()

    # --- the data directory -----------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        # A directory that exists without a lock file may belong to a person and hold other things.
        self._is_ours = make_directory(self.data_dir) or self._lock_path.exists()
        lock_fd = open_lock(self._lock_path)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock_fd, 20, 0).decode("ascii", "replace").strip()
            os.close(lock_fd)
            raise EmbeddedPostgresError(
                f"{self.data_dir} is in use by another sluice (pid {holder}): stop it or give another --data-dir"
            ) from None
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = lock_fd

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _restrict_data_dir(self) -> None:
        """Keep others from listing the directory. An account other than ours must be able to pass through to its
        cluster."""
        if self._is_ours:
            restrict_directory(self.data_dir, needed=0o700 if self._account is None else 0o711)

    @property
    def _found(self) -> Programs:
        assert self._programs is not None, "start finds them first"
        return self._programs

    def _has_cluster(self) -> bool:
        return os.path.lexists(self.cluster_dir)

    async def _choose_account(self) -> None:
        owner = self.cluster_dir.lstat() if self._has_cluster() else None
        if os.geteuid() != 0:
            if owner is not None and owner.st_uid != os.geteuid():
                raise EmbeddedPostgresError(
                    f"{self.cluster_dir} belongs to uid {owner.st_uid}: run as that user or give another --data-dir"
                )
            self._account = None
            return
        moving = sorted(self.data_dir.glob(f"{CLUSTER}.from-*"))
        if moving and (owner is not None or len(moving) > 1):
            raise EmbeddedPostgresError(f"{moving[0]} lies beside another cluster: move one of the two elsewhere")
        if owner is not None and owner.st_uid != 0:
            self._account = Account(owner.st_uid, owner.st_gid)
            return
        self._account = await own_account()
        if owner is not None:
            self._socket_dir = socket_directory(self.data_dir)
            await self._stop_leftover()
            moving.append(self.data_dir / f"{CLUSTER}.from-{owner.st_uid}")
            self.cluster_dir.rename(moving[-1])
        for directory in moving:
            await self._take_over(directory, self._account)

    async def _take_over(self, directory: Path, account: Account) -> None:
        """Give a cluster that root restored from a copy to its account.

        Until every file has changed hands, the directory has a name that contains its former owner. So the next start
        completes a start that was cut short.
        """
        previous_uid = int(directory.name.rpartition("-")[2])

        def give() -> None:
            give_tree(directory, {previous_uid}, account.owner)
            directory.rename(self.cluster_dir)
            sync_directory(self.data_dir)

        await asyncio.to_thread(give)
        logger.info("postgres cluster given to its account", uid=account.uid, previous_uid=previous_uid)

    def running_url(self) -> str | None:
        """Return the URL of the server that another process runs in the directory; None if no server runs. Called
        instead of `start`."""
        found = running_url(self.data_dir)
        if found is not None:
            self._socket_dir = socket_directory(self.data_dir)
        return found

    def _prepare_socket_dir(self) -> None:
        directory = socket_directory(self.data_dir)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        owners = {os.geteuid()}
        if self._account is not None:
            owners.add(self._account.uid)
        # The directory may lie in a shared place under a name that others can guess.
        try:
            with opened_directory(directory) as directory_fd:
                found = os.fstat(directory_fd)
                is_private = not found.st_mode & 0o077 and found.st_uid in owners
                if is_private and self._account is not None:
                    os.fchown(directory_fd, *self._account.owner)
        except (NotADirectoryError, FileNotFoundError):
            is_private = False
        if not is_private:
            raise EmbeddedPostgresError(f"{directory} is not a private directory of this user: remove it")
        self._socket_dir = directory

    def _check_cluster(self) -> None:
        version = read_file(self.cluster_dir / "PG_VERSION", MAX_SMALL_FILE_BYTES).decode("ascii", "replace").strip()
        if version != str(self._found.major):
            raise EmbeddedPostgresError(
                f"{self.cluster_dir} was written by Postgres {version}, and {self._found.directory} has "
                f"{self._found.major}: name the programs of Postgres {version} by --postgres-bin, or move the data by "
                "`sluice backup` and `sluice restore`"
            )

    async def _initdb(self) -> None:
        """Create the cluster beside its place and move it there whole, so that a torn one is never started."""
        fresh = self.data_dir / f"{CLUSTER}.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(mode=0o700)
        if self._account is not None:
            with opened_directory(fresh) as directory_fd:
                os.fchown(directory_fd, *self._account.owner)
        process = await self._spawn(
            fresh,
            [
                *(
                    "initdb",
                    "-D",
                    str(fresh),
                    "-U",
                    USER,
                    "-E",
                    "UTF8",
                    "--locale=C",
                    "-A",
                    "trust",
                    "--no-instructions",
                    "--data-checksums",  # the default since Postgres 18
                ),
                # A cluster that is never synced belongs to a test and is copied. Small segments make the copy smaller.
                *(["--no-sync", "--wal-segsize=1"] if self._settings["fsync"] == "off" else []),
            ],
            asyncio.subprocess.PIPE,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), INITDB_SECONDS)
        except TimeoutError:
            raise EmbeddedPostgresError(f"initdb did not finish in {INITDB_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                # The servers that this process has started end too, because they belong to its session.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed: {fatal_line(output)}")
        fresh.rename(self.cluster_dir)
        sync_directory(self.data_dir)
        logger.info("postgres cluster created", directory=str(self.cluster_dir))

    def _write_configuration(self) -> None:
        """Write postgresql.conf, which is ours and derived. An operator's own settings go through ALTER SYSTEM and
        win."""
        text = configuration(self._settings, self._connections, self._socket_dir, self._found.major)
        self._write_owned("postgresql.conf", text)
        if self._account is None:
            # The socket's directory admits no other account, and the user may have no name to compare.
            self._write_owned("pg_hba.conf", "local all all trust\nlocal replication all trust\n")
        else:
            # The account itself need not connect, and an existing cluster's account may be shared. So only root may
            # connect.
            root = pwd.getpwuid(0).pw_name
            lines = [f"local {databases} all peer map=gateway\n" for databases in ("all", "replication")]
            self._write_owned("pg_hba.conf", "".join(lines))
            self._write_owned("pg_ident.conf", f"gateway {root} {USER}\n")

    def _write_owned(self, name: str, text: str) -> None:
        write_file(self.cluster_dir / name, text.encode(), None if self._account is None else self._account.owner)

    # --- the server -------------------------------------------------------------------------------------------

    async def _spawn(self, directory: Path, command: list[str], output: int) -> asyncio.subprocess.Process:
        executable = self._found.directory / command[0]
        account = ("-", "-") if self._account is None else (str(self._account.uid), str(self._account.gid))
        child = Path(__file__).with_name("embedded_child.py")
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(child)),
            *(*account, str(os.getpid()), str(directory), str(executable), *command[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output if output != asyncio.subprocess.PIPE else asyncio.subprocess.STDOUT,
            # The working directory must not be ours, which the server's user may be unable to enter. The session must
            # not be ours, because Ctrl-C on our terminal is for this process.
            cwd="/",
            start_new_session=True,
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
        )

    async def _launch(self) -> None:
        """Start our child and wait until it accepts connections; EmbeddedPostgresError leaves nothing running."""
        await self._stop_leftover()
        self._write_configuration()
        await asyncio.to_thread(self._limit_log)
        self._log_start_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        started = time.monotonic()
        log_fd = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._process = await self._spawn(self.cluster_dir, ["postgres", "-D", str(self.cluster_dir)], log_fd)
        finally:
            os.close(log_fd)
        self._launched_at = started
        try:
            await self._wait_until_ready(self._process, started)
        except BaseException:
            await self._stop_child()
            raise
        logger.info("postgres started", pid=self._process.pid, took_ms=round((time.monotonic() - started) * 1000))

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, started: float) -> None:
        """Follow the status line that the postmaster keeps in its pid file, as pg_ctl does."""
        patience = started + 5.0
        while True:
            pid, status = self._postmaster_status()
            if pid == process.pid and status == "ready":
                return
            if process.returncode is not None:
                raise EmbeddedPostgresError(f"postgres ended with {process.returncode}: {self._fatal_log_line()}")
            now = time.monotonic()
            if now > started + START_SECONDS:
                raise EmbeddedPostgresError(f"postgres was not ready in {START_SECONDS:.0f} s: {self._last_log_line()}")
            if now > patience:
                logger.warning("waiting for postgres", waited_s=round(now - started), last_line=self._last_log_line())
                patience = now + 5.0
            await asyncio.sleep(POLL_SECONDS)

    def _postmaster_status(self) -> tuple[int | None, str]:
        """Return process id and status from postmaster.pid, whose lines the server writes one after the other."""
        try:
            lines = self._pid_file().splitlines()
        except FileNotFoundError:
            return None, ""
        pid = int(lines[0]) if lines and lines[0].strip().isdigit() else None
        return pid, lines[7].strip() if len(lines) > 7 else ""

    def _pid_file(self) -> str:
        return read_file(self.cluster_dir / "postmaster.pid", MAX_SMALL_FILE_BYTES).decode("utf-8", "replace")

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            process = self._process
            if process is not None:
                try:
                    returncode = await asyncio.wait_for(process.wait(), self._bounds.log_check_s)
                except TimeoutError:
                    await asyncio.to_thread(self._limit_log)
                    continue
                logger.error("postgres died", returncode=returncode, last_line=self._last_log_line())
                if time.monotonic() - self._launched_at > STEADY_SECONDS:
                    backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, self._bounds.last_backoff_s)
            try:
                await self._launch()
            except (EmbeddedPostgresError, OSError) as error:
                logger.error("postgres could not be started again", error=str(error), retry_in_s=backoff)
            else:
                self.restarts += 1

    async def _stop_child(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stop_signal, seconds in (
            (signal.SIGINT, self._bounds.stop_fast_s),
            (signal.SIGQUIT, self._bounds.stop_immediate_s),
            (signal.SIGKILL, self._bounds.stop_immediate_s),
        ):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(stop_signal)
            try:
                await asyncio.wait_for(process.wait(), seconds)
                return
            except TimeoutError:
                logger.warning("postgres has not stopped", signal=stop_signal.name, waited_s=seconds)

    async def _abandon(self) -> None:
        await self._stop_child()
        self._release_lock()

    async def _stop_leftover(self) -> None:
        """End a server that outlived its gateway, such as one that is still shutting down after a kill.

        The directory's lock is ours, so no living gateway needs the server. We do not adopt it, because it would not
        die with us.
        """
        pid = self._leftover_pid()
        if pid is not None:
            await self._end(pid)
        self._disown_lock_files()

    async def _end(self, pid: int) -> None:
        logger.warning("stopping a postgres that outlived its gateway", pid=pid)
        for stop_signal, seconds in (
            (signal.SIGINT, LEFTOVER_FAST_SECONDS),
            (signal.SIGQUIT, self._bounds.stop_immediate_s),
        ):
            try:
                os.kill(pid, stop_signal)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if self._leftover_pid() != pid:
                    return
                await asyncio.sleep(POLL_SECONDS)
        raise EmbeddedPostgresError(f"a postgres with pid {pid} holds {self.cluster_dir} and does not stop")

    def _leftover_pid(self) -> int | None:
        """Return the pid of a live postmaster on our cluster that is not our child."""
        pid, _ = self._postmaster_status()
        if pid is None:
            return None
        command = _command_of(pid)
        if command is None or os.fsencode(self.cluster_dir) not in command:
            return None
        # The cluster's owner writes this number into the file, and must not make us end another user's process. A
        # process of root is never a postmaster, because Postgres refuses to run as root.
        uid = _uid_of_process(pid)
        return pid if uid and uid == self.cluster_dir.lstat().st_uid else None

    def _disown_lock_files(self) -> None:
        """Remove the pid of a dead server from its lock files.

        By now the pid may belong to another process, or to a zombie that pid 1 has not reaped. Postgres would mistake
        either for a running server; it does not mistake its own parent, this process, for one. The rest of
        postmaster.pid stays, because by it Postgres finds the shared memory that a lost backend still holds.
        """
        with contextlib.suppress(FileNotFoundError):
            _, _, rest = self._pid_file().partition("\n")
            self._write_owned("postmaster.pid", f"{os.getpid()}\n{rest}")
        with contextlib.suppress(FileNotFoundError), opened_directory(self._socket_dir) as directory_fd:
            os.unlink(f"{SOCKET_NAME}.lock", dir_fd=directory_fd)

    # --- its log ----------------------------------------------------------------------------------------------

    def _limit_log(self) -> None:
        """Keep one former log of at most `max_log_bytes`; the server appends, so the file can be cut under it.

        If that fails, only log it. A full disk also ends Postgres, and Postgres must still be started again.
        """
        is_too_long = False
        try:
            if self.log_path.exists() and self.log_path.stat().st_size > self._bounds.max_log_bytes:
                write_file(self.log_path.with_suffix(".log.1"), self.log_path.read_bytes())
                os.truncate(self.log_path, 0)
        except OSError as error:
            is_too_long = True
            if not self._log_is_too_long:
                logger.warning(
                    "the log of postgres cannot be cut: trying again", path=str(self.log_path), error=str(error)
                )
        self._log_is_too_long = is_too_long

    def _last_log_line(self) -> str:
        return last_line(self._log_from(-4096))

    def _fatal_log_line(self) -> str:
        """Return the line of the log that says why this start failed."""
        return fatal_line(self._log_from(self._log_start_bytes)[:65536])

    def _log_from(self, position: int) -> bytes:
        """Return the log from `position` on, or its last bytes if `position` is negative. Empty if it cannot be read,
        for example because this process has too many open files: Postgres must still be started again."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as file:
            file.seek(position if position >= 0 else max(0, self.log_path.stat().st_size + position))
            return file.read()
        return b""


def _command_of(pid: int) -> list[bytes] | None:
    """Return the arguments of a live process; None if no such process lives (a zombie has no arguments either)."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return arguments if arguments[0] else None


def _uid_of_process(pid: int) -> int | None:
    """Return the effective uid of a live process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    uids = next(line for line in status.splitlines() if line.startswith("Uid:"))
    return int(uids.split()[2])
