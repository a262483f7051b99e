"""Hosts of the harness are apart, shaped in both directions, counted, and gone when they end."""

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
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(bytes(4 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[netns.Hosts]:
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Hosts(3, rate="40mbit") as three:
        yield three


def seconds_to_send(hosts: netns.Hosts, *sources: int) -> float:
    """Send 4 MiB from each to the first host at once; the seconds until it has all of it."""
    processes = []
    for port in (5000 + source for source in sources):
        command = [sys.executable, "-c", RECEIVE, str(port)]
        processes.append(hosts[0].popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"listening\n"
    began = time.monotonic()
    for source in sources:
        command = [sys.executable, "-c", SEND, hosts[0].name, str(5000 + source)]
        processes.append(hosts[source].popen(command))
    for process in processes:
        with process:
            assert process.wait(60) == 0
    return time.monotonic() - began


@pytest.mark.parametrize("sources", [[1], [1, 2]])
def test_links_have_their_rate_in_both_directions_and_count_what_was_sent(hosts, sources):
    before = hosts[1].sent()
    # Of two, each with a link to itself, only the receiver's own can slow them down. 64 kB may go
    # at once.
    sent = 4 * MEGABYTE * len(sources)
    assert seconds_to_send(hosts, *sources) >= (sent - 65536) * 8 / 40e6
    payload = (hosts[1].sent() - before).payload
    # Whoever asks for an address first sends packets without TCP's headers; a link that drops a
    # packet carries it again.
    assert 0.999 * 4 * MEGABYTE <= payload <= 1.1 * 4 * MEGABYTE


def test_a_killed_maker_leaves_nothing_behind(hosts):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tests.netns import Hosts
        with Hosts(2) as hosts:
            hosts[0].popen(["sleep", "600"])
            while not hosts[0].processes():
                time.sleep(0.01)
            print(*hosts[0].processes(), *(host.pid for host in hosts), flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        processes = list(map(int, maker.stdout.readline().split()))
        assert len(processes) == 3
        maker.kill()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < end, "processes of a host outlive its maker"
        time.sleep(0.01)
