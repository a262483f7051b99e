"""Several hosts on one machine: namespaces joined by a switch whose links have a real rate.

    with Hosts(2, rate="100mbit") as hosts:
        process = hosts[0].popen(["python", "-c", "..."])
        print(hosts[0].name, hosts[0].address, hosts[0].sent())

Each host has a private network, host name, ``/etc/hosts`` and process tree; all hosts share files.
A veth pair connects it to a bridge. ``tc tbf`` shapes the pair in both directions, and offloads are
off, so the interface counts the packets that a wire would carry.

The hosts leave no process, network or name behind, except one small file in the folder for
temporary files if the process that made them is killed. A namespace lives as long as its first
process. That process ends when its input is closed, at the end of the ``with`` or when the maker is
killed. The kernel then ends every other process of the host. The namespaces have no names, so they
cannot clash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["HEADER_BYTES", "Host", "Hosts", "missing", "sent"]

# Ethernet, IPv4, TCP and TCP's timestamps in each packet.
HEADER_BYTES = 14 + 20 + 20 + 12
INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "ethtool", "unshare", "nsenter", "mount", "hostname")
# The first process of a namespace makes it a host, prints a line, and ends when its input ends.
_FIRST_PROCESS = """
set -e
hostname "$1"
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi
ip link set lo up
echo ready
exec cat
"""


def missing() -> str | None:
    """Return the reason for which this machine cannot make hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing_tools = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing_tools:
        tools = ", ".join(missing_tools)
        return f"no {tools} here (apt-get install iproute2 ethtool util-linux)"
    return None


def sent(process: int | str = "self") -> int:
    """Return the bytes, without headers, that left the interface of the host of a process."""
    table = Path(f"/proc/{process}/net/dev").read_text()
    (line,) = [line for line in table.splitlines() if line.lstrip().startswith(INTERFACE)]
    columns = line.split()
    sent_bytes = int(columns[9])
    sent_packets = int(columns[10])
    return sent_bytes - HEADER_BYTES * sent_packets


class Host:
    """One host, which starts processes and counts the bytes that it sends.

    Attributes:
        name: Its host name, which every host can resolve.
        address: IPv4.
    """

    def __init__(self, name: str, address: str, names: Path | None) -> None:
        self.name = name
        self.address = address
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
        first_process = ["sh", "-c", _FIRST_PROCESS, "sh", name, str(names or "")]
        self._unshare = subprocess.Popen(
            [*unshare, *first_process],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._unshare.stdout.readline() != b"ready\n":
            error = self._unshare.stderr.read().decode().strip()
            raise OSError(f"host {name}: {error}")
        parent = self._unshare.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        self.pid = int(children.split()[0])

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs a command on this host."""
        nsenter = ["nsenter", "-t", str(self.pid)]
        namespaces = ["--net", "--uts", "--mount", "--pid"]
        folder = f"--wdns={os.getcwd()}"
        return [*nsenter, *namespaces, folder, *map(str, command)]

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; options as for ``subprocess.Popen``.

        Signals do not pass through the returned process.
        """
        return subprocess.Popen(self.enter(command), **options)

    def run(self, command: Sequence[str | Path]) -> str:
        """Run a command to its end and return its output; raise if it fails."""
        return _run(self.enter(command))

    def sent(self) -> int:
        """Return the bytes, without headers, that left this host since it came up."""
        return sent(self.pid)

    def close(self) -> None:
        """End the host and every process on it."""
        with self._unshare as unshare:
            unshare.stdin.close()


class Hosts(list[Host]):
    """A list of hosts on one switch, each behind a link of one rate in both directions.

    Args:
        size: Hosts, at most 250.
        rate: The rate of each link and direction in the notation of ``tc`` (``100mbit``,
            ``1gbit``), or None for links that are not shaped.
        congestion: The name of TCP's congestion control, or None for the setting of this machine.
            Set it if results of several machines are compared, because collectives take up to a
            twentieth longer with some.

    Raises:
        OSError: If this machine cannot make hosts (see `missing`).
    """

    def __init__(
        self,
        size: int,
        rate: str | None = None,
        *,
        congestion: str | None = None,
    ) -> None:
        self.size = size
        self.rate = rate
        self.congestion = congestion
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if reason := missing():
            raise OSError(reason)
        addresses = {}
        for index in range(self.size):
            addresses[f"host{index}"] = f"10.77.0.{index + 1}"
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))
            names = Path(folder) / "hosts"
            _write_names(names, addresses)
            switch = stack.enter_context(contextlib.closing(Host("switch", "", None)))
            switch.run(["ip", "link", "add", "bridge", "type", "bridge"])
            switch.run(["ip", "link", "set", "bridge", "addrgenmode", "none", "up"])
            for name, address in addresses.items():
                host = stack.enter_context(contextlib.closing(Host(name, address, names)))
                self._connect(switch, host)
                self.append(host)
            self._switch = switch
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._stack.close()

    def cut(self, index: int) -> None:
        """Cut the link of a host in both directions; as with a pulled cable, no end notices."""
        self._set_port(index, "nomaster")

    def join(self, index: int) -> None:
        """Connect a host again after `cut`."""
        self._set_port(index, "master", "bridge")

    def switch_off(self, index: int) -> None:
        """End every process of a host at once; the network stays for processes started later."""
        self[index].run(["sh", "-c", "kill -KILL -1"])

    def _set_port(self, index: int, *settings: str) -> None:
        port = f"to-{self[index].name}"
        self._switch.run(["ip", "link", "set", port, *settings])

    def _connect(self, switch: Host, host: Host) -> None:
        """Connect a host to the switch and shape both ends of the cable."""
        port = f"to-{host.name}"
        self._add_cable(switch, port, host)
        switch.run(["ip", "link", "set", port, "master", "bridge", "addrgenmode", "none", "up"])
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", INTERFACE])
        host.run(["ip", "link", "set", INTERFACE, "addrgenmode", "none", "up"])
        if self.congestion is not None:
            # Each network has a setting, which begins as a copy of the machine's.
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            host.run(["sh", "-c", f"echo {self.congestion} >{setting}"])
        self._shape(switch, port)
        self._shape(host, INTERFACE)

    def _add_cable(self, switch: Host, port: str, host: Host) -> None:
        """Add a veth pair with one end in each network."""
        # The switch does not see the processes of the host, which name the host's network. The pair
        # is therefore made outside of both, and then moved.
        temporary_name = f"v{host.pid}"
        host_end = ["peer", "name", INTERFACE, "netns", str(host.pid)]
        _run(["ip", "link", "add", "name", temporary_name, "type", "veth", *host_end])
        _run(["ip", "link", "set", temporary_name, "name", port, "netns", str(switch.pid)])

    def _shape(self, host: Host, interface: str) -> None:
        """Switch off the offloads of an interface, and limit its rate."""
        offloads = ["tso", "off", "gso", "off", "gro", "off", "tx", "off", "rx", "off", "sg", "off"]
        host.run(["ethtool", "-K", interface, *offloads])
        if self.rate is not None:
            # A packet that waits in the link's queue for longer than the latency is dropped.
            token_bucket = ["tbf", "rate", self.rate, "burst", "64kb", "latency", "200ms"]
            host.run(["tc", "qdisc", "add", "dev", interface, "root", *token_bucket])


def _write_names(path: Path, addresses: dict[str, str]) -> None:
    """Write an ``/etc/hosts`` with all hosts."""
    lines = ["127.0.0.1 localhost"]
    for name, address in addresses.items():
        lines.append(f"{address} {name}")
    path.write_text("\n".join(lines) + "\n")


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        output = process.stderr.strip() or process.stdout.strip()
        raise OSError(f"{' '.join(command)}: {output}")
    return process.stdout
