"""What a bucket costs in Python on a host whose device and network take no time.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_host --hosts 128 --ranks 8

Streams, communicators and kernels do nothing, and tensors have no memory: what is left is what the
calling thread does for a bucket of 25 MiB.
"""

from benchmarks.comm_hooks_lanes import imagined
from benchmarks.common import command, interleave, median
from distamp.comm_hooks import COMM_FORMATS


def main(*, hosts: int = 128, ranks: int = 8, rounds: int = 500) -> None:
    """Print a line for each format."""
    for wire in COMM_FORMATS:
        with imagined(hosts, ranks, wire) as average:
            times = interleave({wire: average}, rounds)[wire]
        print(f"{hosts} hosts of {ranks} ranks, {wire}: {median(times, 1e6)} us a bucket")


if __name__ == "__main__":
    command(main)
