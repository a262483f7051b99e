"""Several hosts on one machine: namespaces joined by a switch whose links have a real rate.

    with Hosts(2, rate="100mbit") as hosts:
        process = hosts[0].popen(["python", "-c", "..."])
        print(hosts[0].name, hosts[0].address, hosts[0].sent())

Each host has a network, a host name, an ``/etc/hosts`` and processes of its own; files are shared.
It hangs on a veth pair from a bridge, shaped by ``tc tbf`` in both directions, with offloads off,
so its interface counts the packets that a wire would carry.

No process, network or name can be left behind; a killed maker leaves one small file in the folder
for temporary files. A namespace lives as long as its first process, which ends with the
pipe that its maker holds: at the end of the ``with``, or when the maker is killed. The kernel then
ends every other process of that host. The namespaces have no names that could clash or stay.
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

# Of each packet: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12.
HEADER_BYTES = 66
INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "ethtool", "unshare", "nsenter", "mount", "hostname")
# The first process of a namespace: makes it a host, says so, and ends when its input does.
_HOLD = """
set -e
hostname "$1"
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; fi
ip link set lo up
echo ready
exec cat
"""


def missing() -> str | None:
    """Return why this machine cannot do it, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)} here (apt-get install iproute2 ethtool util-linux)"
    return None


def sent(process: int | str = "self") -> int:
    """Return the bytes, without headers, that left the interface of the host of a process."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    (counts,) = (line.split() for line in lines if line.lstrip().startswith(INTERFACE))
    return int(counts[9]) - HEADER_BYTES * int(counts[10])


class Host:
    """One host: start processes on it, ask what it sent.

    Attributes:
        name: Its host name, which every host can resolve.
        address: IPv4.
    """

    def __init__(self, name: str, address: str, names: Path | None) -> None:
        self.name = name
        self.address = address
        self._keeper = subprocess.Popen(
            [
                *("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"),
                *("sh", "-c", _HOLD, "sh", name, str(names or "")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._keeper.stdout.readline() != b"ready\n":
            raise OSError(f"host {name}: {self._keeper.stderr.read().decode().strip()}")
        keeper = self._keeper.pid
        self.pid = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs a command on this host."""
        inside = ("--net", "--uts", "--mount", "--pid", f"--wdns={os.getcwd()}")
        return ["nsenter", "-t", str(self.pid), *inside, *map(str, command)]

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
        with self._keeper as keeper:
            keeper.stdin.close()


class Hosts(list[Host]):
    """A list of hosts on one switch, each behind a link of one rate in both directions.

    Args:
        size: Hosts, at most 250.
        rate: Of each link and direction as ``tc`` writes it (``100mbit``, ``1gbit``), or None for
            links that are not shaped.
        congestion: TCP's congestion control by name, where that is to be the same on all machines:
            with another, collectives take up to a twentieth longer. None is this machine's own.

    Raises:
        OSError: If this machine cannot do it (see `missing`).
    """

    def __init__(
        self,
        size: int,
        rate: str | None = None,
        *,
        congestion: str | None = None,
    ) -> None:
        self.size, self.rate, self.congestion = size, rate, congestion
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if reason := missing():
            raise OSError(reason)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            names = folder / "hosts"
            known = [(f"host{i}", f"10.77.0.{i + 1}") for i in range(self.size)]
            rows = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in known)]
            names.write_text("\n".join(rows) + "\n")
            switch = stack.enter_context(contextlib.closing(Host("switch", "", None)))
            switch.run(["ip", "link", "add", "bridge", "type", "bridge"])
            switch.run(["ip", "link", "set", "bridge", "addrgenmode", "none", "up"])
            for name, address in known:
                host = stack.enter_context(contextlib.closing(Host(name, address, names)))
                self._plug(switch, host)
                self.append(host)
            self._switch = switch
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._stack.close()

    def cut(self, index: int) -> None:
        """Cut the link of a host in both directions; neither end notices, as of a pulled cable."""
        self._port(index, "nomaster")

    def join(self, index: int) -> None:
        """Put back what `cut` took away."""
        self._port(index, "master", "bridge")

    def switch_off(self, index: int) -> None:
        """End every process of a host at once; its network stays, for those started later."""
        self[index].run(["sh", "-c", "kill -KILL -1"])

    def _port(self, index: int, *how: str) -> None:
        self._switch.run(["ip", "link", "set", f"to-{self[index].name}", *how])

    def _plug(self, switch: Host, host: Host) -> None:
        """Join a host to the switch and shape both ends of the cable."""
        port = f"to-{host.name}"
        pair = ["type", "veth", "peer", "name", INTERFACE, "netns", str(host.pid)]
        # The far end is named by the process whose network it shall be in, as the switch sees it:
        # it does not see the host's processes, so the cable is made from outside both.
        made = f"v{host.pid}"
        _run(["ip", "link", "add", "name", made, *pair])
        _run(["ip", "link", "set", made, "name", port, "netns", str(switch.pid)])
        switch.run(["ip", "link", "set", port, "master", "bridge", "addrgenmode", "none", "up"])
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", INTERFACE])
        host.run(["ip", "link", "set", INTERFACE, "addrgenmode", "none", "up"])
        if self.congestion is not None:
            # Each network has its own, taken over from the machine's.
            chosen = f"echo {self.congestion} >/proc/sys/net/ipv4/tcp_congestion_control"
            host.run(["sh", "-c", chosen])
        for end, interface in ((switch, port), (host, INTERFACE)):
            off = ["tso", "off", "gso", "off", "gro", "off", "tx", "off", "rx", "off", "sg", "off"]
            end.run(["ethtool", "-K", interface, *off])
            if self.rate is not None:
                # A packet waits in a link's queue for as long before it is dropped.
                shape = ["rate", self.rate, "burst", "64kb", "latency", "200ms"]
                end.run(["tc", "qdisc", "add", "dev", interface, "root", "tbf", *shape])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
