"""The command line as a person types it."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog

from gateway.apis import SERVED
from gateway.cli import main
from gateway.config.settings import OPTIONS
from protocol import codec
from protocol.headers import RequestHeader, encode_request_header
from protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from tests.gateway_process import free_ports


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(name)


def hexed(message: object, version: int) -> str:
    return b"".join(bytes(chunk) for chunk in codec.encode(message, version)).hex()


def test_config_shows_each_value_and_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_DATABASE_URL", "postgresql://me:secret@host/db")
    assert main(["config", "--listen", "127.0.0.1:7", "--set", "num.partitions=3"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["listen", "127.0.0.1:7", "flag --listen"] in lines
    assert ["database-url", "postgresql://me:…@host/db", "environment SLUICE_DATABASE_URL"] in lines
    assert ["data-dir", ".sluice", "default"] in lines
    assert ["num.partitions", "3", "flag --set"] in lines
    assert ["group.initial.rebalance.delay.ms", "3000", "default"] in lines


@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_wrong_value_is_one_line_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--listen", "nowhere"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("sluice: listen: 'nowhere' (from flag --listen): expected HOST:PORT")


def test_an_unknown_flag_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--lissten", "127.0.0.1:7"])
    assert exited.value.code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--lissten", "127.0.0.1:7"], "did you mean --listen?"),
        (["topics", "list", "--bootstrp=h:1"], "did you mean --bootstrap?"),
        (["topic", "list"], "there is no command 'topic'; did you mean topics?"),
        (["groups", "histry", "g"], "did you mean history?"),
        (["test-server", "--log-level", "verbose"], "there is no 'verbose' (debug, info, warning, error)"),
        (["nothing-like-it"], "there is no command 'nothing-like-it'\n"),
    ],
)
def test_mistyped_command_is_reported_with_the_nearest_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["check", "backup", "restore", "nodes", "users add", "users delete", "users list", "groups history"]
)
def test_a_command_that_asks_the_database_lists_no_option_of_a_node(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main([*command.split(), "--help"])
    assert exited.value.code == 0
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    of_database = {"--database-url", "--data-dir", "--postgres-bin", "--log-store"}
    assert flags >= {"--config", *of_database}
    others = {option.flag for option in OPTIONS} - of_database
    assert not flags & others


def test_help_of_users_names_the_database_as_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["users", "list", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "any broker of the cluster (default: none, and the command uses the database)" in text


def test_help_says_which_commands_ask_a_broker_and_which_the_database(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    broker, database = text.index("Ask a broker"), text.index("Ask the database")
    for name in ("topics", "groups ", "transactions", "healthcheck"):
        assert broker < text.index(f"\n  {name}") < database
    for name in ("nodes", "users", "groups history", "check ", "backup", "restore"):
        assert text.index(f"\n  {name}") > database


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_import_nothing_of_the_gateway(flag: str) -> None:
    """Importing the gateway takes more than a second of CPU on a slow machine."""
    program = (
        "import sys\nfrom gateway.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('gateway', 'protocol', 'storage') or "
        "getattr(sys.modules[name], '__file__', None) and 'site-packages' in sys.modules[name].__file__))"
    )
    done = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=True)
    allowed = {
        "gateway",
        "gateway.cli",
        "gateway.commands",
        "gateway.commands.parsing",
        "gateway.config",
        "gateway.config.suggestions",
        "gateway.version",
    }
    imported = {name for name in done.stdout.splitlines()[-1].split() if not name.startswith(("_", "editable"))}
    assert imported - allowed == set()


@pytest.mark.parametrize("flag", ["-b", "--bootstrap", "--bootstrap-server"])
def test_a_broker_is_named_by_either_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "list", flag, "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1 cannot be reached" in capsys.readouterr().err


def test_a_broker_and_its_properties_are_named_by_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_BOOTSTRAP", "127.0.0.1:1")
    assert main(["topics", "list"]) == 1
    assert "127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert main(["topics", "list", "-b", "127.0.0.1:2"]) == 1
    assert "127.0.0.1:2 cannot be reached" in capsys.readouterr().err
    monkeypatch.setenv("SLUICE_COMMAND_CONFIG", "/no/such/file")
    assert main(["topics", "list"]) == 1
    assert "/no/such/file cannot be read" in capsys.readouterr().err


def test_an_absent_database_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.building.database.DATABASE_PATIENCE_S", 0.0)
    # Otherwise the command would redirect the loggers of all tests to this test's captured stderr.
    monkeypatch.setattr("gateway.serve.logs.configure", lambda log_format, level, node: None)
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    code = main(["serve", "--database-url", url, "--listen", "127.0.0.1:0", "--metrics-listen", "off"])
    assert code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sluice: ")]
    assert len(errors) == 1
    assert errors[0].startswith("sluice: cannot use postgresql://nobody:…@127.0.0.1:1/none: ")
    assert "unavailable" in errors[0]
    assert "secret" not in errors[0]


INTERRUPTED_IMPORT = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "gateway.serve":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from gateway.cli import main
main(["serve"])
"""


def test_an_interrupt_while_a_command_is_imported_prints_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_wait_for_the_database_is_not_logged_at_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.building.database.DATABASE_PATIENCE_S", 0.3)
    monkeypatch.setattr("gateway.building.database.DATABASE_RETRY_S", 0.01)
    monkeypatch.setattr("gateway.serve.logs.configure", lambda log_format, level, node: None)
    with structlog.testing.capture_logs() as lines:
        url = "postgresql://me:secret@127.0.0.1:1/none"
        assert main(["serve", "--database-url", url, "--listen", "127.0.0.1:0", "--metrics-listen", "off"]) == 1
    (line,) = lines
    assert line["event"] == "waiting for the database"
    assert line["database"] == "postgresql://me:…@127.0.0.1:1/none"


@pytest.mark.parametrize("option", ["--listen", "--metrics-listen"])
def test_a_port_in_use_is_one_line_that_names_the_option(
    option: str, database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serve.logs.configure", lambda log_format, level, node: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = {"--listen": "127.0.0.1:0", "--metrics-listen": "off", option: address}
        arguments = [part for pair in options.items() for part in pair]
        assert main(["serve", "--database-url", database_url, *arguments]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sluice: ")]
    assert error.endswith(f"on {address} (see {option}): Address already in use")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("option", ["--listen", "--metrics-listen"])
def test_a_port_in_use_leaves_no_data_directory(
    option: str, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serve.logs.configure", lambda log_format, level, node: None)
    free, metrics, port = free_ports(3, in_a_row=workers)
    options = {"--listen": f"127.0.0.1:{free}", "--metrics-listen": f"127.0.0.1:{metrics}"}
    with socket.create_server(("127.0.0.1", port + workers - 1)):
        options[option] = f"127.0.0.1:{port}"
        arguments = [part for pair in options.items() for part in pair]
        data_dir = ("--data-dir", str(tmp_path / "data"))
        assert main(["serve", "--workers", str(workers), *data_dir, *arguments]) == 1
    assert f"on 127.0.0.1:{port + workers - 1}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_healthcheck_without_a_gateway_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["healthcheck", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_healthcheck_ends_in_time_if_the_peer_answers_byte_by_byte(capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"\0\0\0\x40")
            for _ in range(64):
                connection.sendall(b"\0")
                if ended.wait(0.5):
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = threading.Thread(target=drip, args=(server,))
        peer.start()
        began_s = time.monotonic()
        try:
            assert main(["healthcheck", f"127.0.0.1:{server.getsockname()[1]}"]) == 1
        finally:
            ended.set()
            peer.join()
    assert time.monotonic() - began_s < 20
    assert "does not answer: timed out" in capsys.readouterr().err


def test_healthcheck_asks_the_given_address_and_not_the_listeners_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_BROKER_LISTENERS", "PLAINTEXT://127.0.0.1:2,COMPOSE://127.0.0.1:3")
    monkeypatch.setenv("SLUICE_BROKER_LISTENER_SECURITY_PROTOCOL_MAP", "PLAINTEXT:PLAINTEXT,COMPOSE:PLAINTEXT")
    assert main(["healthcheck", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert main(["healthcheck"]) == 1
    assert "127.0.0.1:2 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["JoinGroup", "join_group", "11"])
def test_decode_shows_a_request(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    request = JoinGroupRequest(
        group_id="g", protocols=(JoinGroupRequestProtocol(name="range", metadata=b"\x01\x02"),), reason=None
    )
    assert main(["decode", name, "9", hexed(request, 9)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "JoinGroupRequest"
    assert "  group_id: 'g'" in lines
    assert "    [0]: JoinGroupRequestProtocol" in lines
    assert "      metadata: 2 bytes 0102" in lines
    assert "  reason: None" in lines


def test_decode_shows_a_response(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "Heartbeat", "4", hexed(HeartbeatResponse(error_code=27), 4), "--response"]) == 0
    assert "  error_code: 27" in capsys.readouterr().out.splitlines()


def packet_dump(payload: bytes, *, ipv6: bool) -> str:
    """Return a packet as `tcpdump -X` prints it."""
    tcp = bytes(12) + b"\x80" + bytes(19) + payload  # a header of 32 bytes: IPv4 with four bytes of options
    head = bytearray(b"\x60" + bytes(39) if ipv6 else b"\x46" + bytes(23))  # IPv4 with four bytes of options
    if ipv6:
        head[4:6], head[6] = len(tcp).to_bytes(2, "big"), 6
    else:
        head[2:4], head[9] = (len(head) + len(tcp)).to_bytes(2, "big"), 6
    packet = bytes(head) + tcp
    lines = ["10:31:02.123456 IP 127.0.0.1.50000 > 127.0.0.1.9092: Flags [P.], seq 1:30, ack 1, length 29"]
    for at in range(0, len(packet), 16):
        row = packet[at : at + 16]
        shown = "".join(chr(byte) if 33 <= byte < 127 else "." for byte in row)
        lines.append(f"\t0x{at:04x}:  {row.hex(' ', -2)}  {shown}")
    return "\n".join(lines)


@pytest.mark.parametrize("form", ["hex", "base64", "xxd", "tcpdump", "tcpdump of IPv6"])
def test_decode_shows_a_whole_request_in_every_form(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = encode_request_header(RequestHeader(12, 4, 77, "client-1"))
    request = header + bytes.fromhex(hexed(HeartbeatRequest(group_id="readers", generation_id=3, member_id="m"), 4))
    frame = len(request).to_bytes(4, "big") + request
    forms = {
        "hex": frame.hex(" "),
        "base64": base64.b64encode(frame).decode(),
        "xxd": "\n".join(f"{at:08x}: {frame[at : at + 16].hex(' ', -2)}  ...." for at in range(0, len(frame), 16)),
        "tcpdump": packet_dump(frame, ipv6=False),
        "tcpdump of IPv6": packet_dump(frame, ipv6=True),
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(forms[form]))
    assert main(["decode", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "api_key: 12",
        "api_version: 4",
        "correlation_id: 77",
        "client_id: 'client-1'",
        "HeartbeatRequest",
    ]
    assert "  group_id: 'readers'" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["Nonsense", "0", ""], 2, "no API"),
        (["Heartbeat", "99", ""], 1, "99"),
        (["Heartbeat", "4", "zz!"], 2, "neither hexadecimal, nor base64"),
        (["Heartbeat", "00"], 2, "give API, VERSION and BYTES"),
        (["00000004000c0004"], 2, "4 bytes"),
        (["000000ff000c0004"], 2, "the request is 255 bytes long, and 4 of them are here"),
        (["000000ff000c0004", "--response"], 2, "a response does not name its API"),
        (["Heartbeat", "4", "00"], 1, "Heartbeat"),
        (["Heartbeat", "4", hexed(HeartbeatRequest(), 4) + "ff"], 1, "1 bytes are left over"),
    ],
)
def test_decode_reports_the_error(
    arguments: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["decode", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_apis_lists_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apis"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SERVED) + 1
    assert ["JoinGroup", "11", "0-9", "broker"] in [line.split() for line in lines]
    assert ["UnregisterBroker", "64", "0-0", "broker,", "controller"] in [line.split() for line in lines]
    assert main(["apis", "--markdown"]) == 0
    assert "| Produce | 0 | 3-13 |" in capsys.readouterr().out


def test_help_names_every_option() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--database-url" in help_text
    assert "--set KEY=VALUE" in help_text


def test_full_disk_behind_the_output_is_one_line_and_exit_code_1() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "apis"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == "sluice: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_closed_output_pipe_causes_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m gateway.cli config | head -n 1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["listen", "127.0.0.1:9092", "default"]
    assert done.stderr == ""
