"""Every op of torch's OpInfo database in a region, and listed: the dtypes that come out.

    python -m tests.autocast.every_op                 the sweep, a line for each difference
    python -m tests.autocast.every_op --threads 60    50 threads that list and dispatch, in seconds

Run by hand; what it printed is in docs/results/autocast_ops.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import threading
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.testing._internal.common_methods_invocations import op_db

from distamp import OpLists, autocast


def dtypes(op: Any, sample: Any, region: Any) -> Any:
    """The dtypes of one call's results, or the error it raises."""
    torch.manual_seed(0)
    try:
        with region:
            out = op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return type(error).__name__
    values = out if isinstance(out, tuple | list) else (out,)
    return tuple(it.dtype for it in values if isinstance(it, torch.Tensor))


def sweep(samples: int, ops: list[Any]) -> None:
    """Compare ours with torch's for every sample, then with the op listed."""
    compared = listed = 0
    for op, dtype in itertools.product(ops, (torch.float32, torch.bfloat16, torch.float16)):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        try:
            inputs = list(itertools.islice(op.sample_inputs("cpu", dtype), samples))
        except Exception as error:
            print(f"no samples: {op.name} {dtype}: {type(error).__name__}")
            continue
        for sample, low in itertools.product(inputs, (torch.bfloat16, torch.float16)):
            theirs = dtypes(op, sample, torch.autocast("cpu", low))
            ours = dtypes(op, sample, autocast("cpu", low))
            compared += 1
            if ours != theirs:
                print(f"differs: {op.name} {dtype} in {low}: {ours}, torch {theirs}")
    for op, (category, given, wanted) in itertools.product(ops, LISTED):
        try:
            lists = OpLists(**{category: {op.name.replace("nn.functional.", "")}})
        except ValueError:
            continue
        if not {given, wanted} <= op.supported_dtypes("cpu"):
            continue
        low = wanted if given is torch.float32 else given
        for sample in itertools.islice(op.sample_inputs("cpu", given), samples):
            cast = sample.transform(functools.partial(changed, given=given, wanted=wanted))
            off = dtypes(op, cast, torch.autocast("cpu", enabled=False))
            found = dtypes(op, sample, autocast("cpu", low, ops=lists))
            listed += 1
            if found != off:
                print(f"listed {category}: {op.name} of {given}: {found}, by hand {off}")
    print(f"{compared} calls as torch's, {listed} calls listed; torch {torch.__version__}")


# What an op is listed as, the dtype of its inputs, and what the list makes of them.
LISTED = [
    ("fp32", torch.bfloat16, torch.float32),
    ("fp32", torch.float16, torch.float32),
    ("lower_precision", torch.float32, torch.bfloat16),
    ("lower_precision", torch.float32, torch.float16),
]


def changed(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """What a list makes of a sample's tensor."""
    listed = isinstance(value, torch.Tensor) and value.dtype is given
    return value.to(wanted) if listed else value


NAMES = ["mm", "linear", "softmax", "layer_norm", "tanh", "gelu", "exp", "log", "sum", "conv2d"]


def work(until: float, seed: int, errors: list[str]) -> int:
    """List ops at random, and see that each follows the lists of this thread."""
    rng, x, count = random.Random(seed), torch.ones(4, 4), 0
    try:
        while time.monotonic() < until:
            fp32 = set(rng.sample(NAMES, 3))
            low = {name for name in rng.sample(NAMES, 3) if name not in fp32}
            exact = rng.random() < 0.5
            lists = OpLists(fp32=fp32, lower_precision=low - fp32, exact=True) if exact else None
            with autocast("cpu", ops=lists):
                for _ in range(rng.randrange(1, 20)):
                    want = torch.float32 if lists and "mm" in fp32 else torch.bfloat16
                    assert torch.mm(x, x).dtype is want, (fp32, low)
                    want = torch.bfloat16 if lists and "tanh" in low else torch.float32
                    assert torch.tanh(x).dtype is want, (fp32, low)
                    F.softmax(F.linear(x, x), -1)
                    count += 1
            torch.mm(x, x)
    except Exception as error:
        errors.append(repr(error))
    return count


def stress(seconds: float) -> None:
    """50 threads that list and dispatch at once."""
    errors: list[str] = []
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=work, args=(until, i, errors)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(threads)} threads, {seconds:g} s, {len(errors)} errors {errors[:3]}")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--part", default="1/1", help="which part of the ops, such as 2/3")
    parser.add_argument("--threads", type=float, metavar="SECONDS")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.threads:
        stress(options.threads)
    else:
        number, parts = map(int, options.part.split("/"))
        sweep(options.samples, op_db[number - 1 :: parts])


if __name__ == "__main__":
    main()
