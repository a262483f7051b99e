"""Hosts of the harness are apart, shaped in both directions, counted, and gone when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import netns

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]

ROOT = Path(__file__).parent.parent
MEGABYTE = 1 << 20
RECEIVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        while connection.recv(1 << 20):
            pass
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    began = time.monotonic()
    connection.sendall(bytes(4 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.monotonic() - began)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if reason := netns.missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[netns.Hosts]:
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Hosts(2, rate="40mbit") as two:
        yield two


def receiver(host: netns.Host, port: int = 5000) -> subprocess.Popen[bytes]:
    """A process that receives all that one connection brings."""
    command = [sys.executable, "-c", RECEIVE, str(port)]
    process: subprocess.Popen[bytes] = host.popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    return process


def send(hosts: netns.Hosts, source: int, target: int) -> float:
    """Send 4 MiB; return the seconds until the other has all of it."""
    with receiver(hosts[target]):
        command = [sys.executable, "-c", SEND, hosts[target].name, "5000"]
        return float(hosts[source].run(command))


def test_a_link_is_shaped_towards_its_host_too():
    # Only the receiver's own link can slow down two hosts that each have a link to themselves.
    with netns.Hosts(3, rate="40mbit") as three:
        receivers = [receiver(three[0], port) for port in (5001, 5002)]
        began = time.monotonic()
        senders = [
            three[number].popen(
                [sys.executable, "-c", SEND, three[0].name, str(5000 + number)],
                stdout=subprocess.DEVNULL,
            )
            for number in (1, 2)
        ]
        for process in (*senders, *receivers):
            with process:
                assert process.wait(60) == 0
        # 64 kB may go at once.
        assert time.monotonic() - began >= (8 * MEGABYTE - 65536) * 8 / 40e6


def test_a_link_has_its_rate_and_counts_what_was_sent(hosts):
    for source, target in ((0, 1), (1, 0)):
        before = hosts[source].sent()
        # 64 kB may go at once.
        assert send(hosts, source, target) >= (4 * MEGABYTE - 65536) * 8 / 40e6
        payload = (hosts[source].sent() - before).payload
        # A link that drops a packet carries it again.
        assert 4 * MEGABYTE <= payload <= 1.02 * 4 * MEGABYTE


def test_each_host_has_a_name_that_all_resolve(hosts):
    for host in hosts:
        assert host.run(["hostname"]).strip() == host.name
        code = f"import socket; print(socket.gethostbyname('{hosts[0].name}'))"
        assert host.run([sys.executable, "-c", code]).strip() == hosts[0].address


def test_a_host_sees_no_process_but_its_own(hosts):
    with hosts[0].popen(["sleep", "60"]) as sleeping:
        while not hosts[0].processes():
            time.sleep(0.01)
        assert "sleep" in hosts[0].run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        assert "sleep" not in hosts[1].run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        os.kill(hosts[0].processes()[0], signal.SIGKILL)
        assert sleeping.wait(30) != 0


def test_a_killed_maker_leaves_nothing_behind():
    code = f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tests.netns import Hosts
        with Hosts(2, rate="1gbit") as hosts:
            hosts[0].popen(["sleep", "600"])
            while not hosts[0].processes():
                time.sleep(0.01)
            print(*hosts[0].processes(), *(host.pid for host in hosts), flush=True)
            time.sleep(600)
    """
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    with maker:
        assert maker.stdout is not None
        processes = list(map(int, maker.stdout.readline().split()))
        assert len(processes) == 3
        maker.kill()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < end, "processes of a host outlive its maker"
        time.sleep(0.01)


def test_a_host_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="count 0: from 1 to 250"):
        netns.Hosts(0)
    with pytest.raises(OSError, match="nonsense"), netns.Hosts(1, rate="nonsense"):
        pass
