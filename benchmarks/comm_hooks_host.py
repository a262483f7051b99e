"""The cost of a bucket in Python on a host with a device and a network that take no time.

    OMP_NUM_THREADS=1 python -m benchmarks.comm_hooks_host --hosts 128 --ranks 8

Streams, communicators and kernels do nothing, and tensors have no memory. The time that remains is
the work of the calling thread for a bucket of 25 MiB.
"""

from benchmarks.comm_hooks_lanes import simulate
from benchmarks.common import format_median, interleave, run_command
from distamp.comm_hooks import COMM_FORMATS


def main(*, hosts: int = 128, ranks: int = 8, rounds: int = 500) -> None:
    """Print the time of a bucket in each format."""
    for comm_format in COMM_FORMATS:
        with simulate(hosts, ranks, comm_format) as average:
            times = interleave({comm_format: average}, rounds)[comm_format]
        microseconds = format_median(times, 1e6)
        print(f"{hosts} hosts of {ranks} ranks, {comm_format}: {microseconds} us a bucket")


if __name__ == "__main__":
    run_command(main)
