"""Hosts of the harness are apart, shaped in both directions, counted, and gone when they end."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import netns

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]

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
