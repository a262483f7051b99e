"""What a bucket takes on a cluster, by arithmetic: to foretell whether a hook is worth its numbers.

    python -m distamp.comm_hooks.foretell --hosts 16 --ranks 8 --gbit 100 --bucket-mb 25

Nothing is measured: bytes are those of the very plans that hooks send by, divided by bandwidths
that are given. Buckets follow each other in two lanes, so the slower of the link between hosts and
all else decides; a lone bucket takes both. ``register(model, "auto")`` measures instead.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from distamp.comm_hooks.formats import WIRE_FORMATS
from distamp.comm_hooks.plans import bucket_plan

__all__ = ["Foretold", "foretell", "main"]

LAUNCHES = 7


@dataclass(frozen=True)
class Foretold:
    """What one way of averaging a bucket takes.

    Args:
        megabytes: What leaves a host, of all its ranks.
        link: Microseconds of the link between hosts.
        rest: Microseconds of all else: links within a host, passes over memory, launches.
    """

    megabytes: float
    link: float
    rest: float

    @property
    def beside(self) -> float:
        """Microseconds a bucket, of many."""
        return max(self.link, self.rest)


def foretell(
    hosts: int,
    ranks: int,
    gbit: float,
    bucket_mb: float = 25.0,
    *,
    inner_gbs: float = 300.0,
    memory_gbs: float = 2000.0,
    launch_us: float = 5.0,
) -> dict[str, Foretold]:
    """Return what each way takes, for a bucket of fp32 gradients.

    Args:
        hosts: How many, at least two.
        ranks: Of each host.
        gbit: Gbit/s of all network cards of a host together.
        bucket_mb: MiB of a bucket, as DDP's ``bucket_cap_mb``.
        inner_gbs: GB/s between two ranks of a host, as one of them sends.
        memory_gbs: GB/s of a device's memory.
        launch_us: Microseconds of a kernel or collective that does nothing.

    Raises:
        ValueError: There is one host, or a speed or the bucket is not above 0.
    """
    if hosts < 2 or ranks < 1:
        raise ValueError(f"{hosts} hosts of {ranks} ranks send nothing: give at least two hosts")
    if not all(each > 0 for each in (gbit, bucket_mb, inner_gbs, memory_gbs)):
        raise ValueError("gbit, bucket_mb, inner_gbs and memory_gbs must be above 0")
    size, count = int(bucket_mb * (1 << 20)), hosts * ranks
    link, inner, memory = gbit * 125.0, inner_gbs * 1e3, memory_gbs * 1e3  # bytes in a microsecond

    def ring(nbytes: float, passes: float) -> Foretold:
        """Torch's all-reduce, which visits each host once; ``passes`` are of its casts."""
        sent = 2 * (count - 1) / count * nbytes
        # A ring's links work at the same time.
        within = max(0.0, sent / inner - sent / link) if ranks > 1 else 0.0
        return Foretold(sent / 1e6, sent / link, within + passes / memory + launch_us)

    found = {"fp32": ring(size, 0), "torch bf16": ring(size / 2, 3 * size)}
    for name, wire in WIRE_FORMATS.items():
        plan = bucket_plan(wire, hosts, ranks, 0, [size // 4], 4)
        if plan is None:
            found[name] = found["fp32"]
            continue
        row = plan.parts[0].row_bytes
        encoded = row * count
        sent = 2 * (hosts - 1) * row * ranks
        within = (ranks - 1) / ranks * (size + encoded) / inner
        # Encoding and adding up read what a rank has of its host's part; decoding writes all.
        passes = (size + 4 * encoded / ranks + encoded + size) / memory
        found[name] = Foretold(sent / 1e6, sent / link, within + passes + LAUNCHES * launch_us)
    return found


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(
        prog="python -m distamp.comm_hooks.foretell", description=__doc__.splitlines()[0]
    )
    for name, kind, default, text in (
        ("hosts", int, None, ""),
        ("ranks", int, None, "of each host"),
        ("gbit", float, None, "Gbit/s of a host's cards"),
        ("bucket-mb", float, 25.0, "MiB of a bucket"),
        ("inner-gbs", float, 300.0, "GB/s within a host"),
        ("memory-gbs", float, 2000.0, "GB/s of memory"),
        ("launch-us", float, 5.0, "microseconds of a kernel"),
    ):
        required = default is None
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, required=required)
    try:
        ways = foretell(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))
    print("way          MB a host   us of the link   us of the rest   us a bucket")
    for name, each in ways.items():
        times = f"{each.link:14.0f}   {each.rest:14.0f}   {each.beside:11.0f}"
        print(f"{name:<12} {each.megabytes:9.1f}   {times}")
    fastest = min(ways, key=lambda name: ways[name].beside)
    print(f"by arithmetic {fastest} is the fastest; nothing was measured")


if __name__ == "__main__":
    main()
