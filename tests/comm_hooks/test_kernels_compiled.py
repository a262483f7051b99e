"""Triton's kernels can be compiled for GPUs, which needs none."""

import os
import subprocess
import sys

import pytest

from distamp.comm_hooks import WIRE_FORMATS

KERNELS = ["encode_kernel", "decode_kernel", "sum_kernel", "sum_encode_kernel"]


def compiled(capability: int, formats: list[str]) -> list[list[str]]:
    pytest.importorskip("triton", reason="needs the package triton, of the test extra")
    command = [sys.executable, "-m", "tests.comm_hooks.compiled_kernels", str(capability)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--formats", *formats],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def check(capability: int, formats: list[str]) -> None:
    lines = compiled(capability, formats)
    expected = [[str(capability), kernel, name] for kernel in KERNELS for name in formats]
    assert [line[:3] for line in lines] == expected
    # A product that is fused with a sum is not rounded as torch's is.
    assert {line[3] for line in lines} == {"0"}
    # Gradients alone are 8 loads or 4 stores of a thread.
    assert min(int(line[4]) for line in lines) >= 4


def test_kernels_compile_for_a_gpu_round_every_product_and_take_16_bytes_at_once():
    check(90, ["fp16", "int8"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_every_format_compile(capability):
    check(capability, list(WIRE_FORMATS))
