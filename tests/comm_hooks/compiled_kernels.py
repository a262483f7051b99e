"""Compile every Triton kernel of every wire format to PTX, which needs no GPU.

    python -m tests.comm_hooks.compiled_kernels 80 90 [--formats fp16 int8]

For each compute capability, kernel and format a line, which ends with how many multiplications are
fused with an addition, and so rounded once instead of twice; what cannot be compiled raises. To be
run in a process of its own, in which Triton does not interpret.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distamp.comm_hooks import WIRE_FORMATS, kernels
from distamp.comm_hooks.wire import WireFormat

KERNELS = (
    kernels.encode_kernel,
    kernels.decode_kernel,
    kernels.sum_kernel,
    kernels.sum_encode_kernel,
)
PAYLOADS = {"int8": "*i8", "bf16": "*i16"}
# Of arguments that are no 64-bit integers.
TYPES = {
    "headers": "*i16",
    "given_headers": "*i16",
    "table": "*i32",
    "local": "*u8",
    "first": "*i64",
    "parts": "*i64",
    "header": "*i64",
    "wires": "i32",
    "lowest": "i32",
    "head": "*i64",
    **dict.fromkeys(("values", "out", "residual", "left", "scale"), "*fp32"),
    **dict.fromkeys(("inverse", "divisor"), "fp32"),
}


def ptx(kernel: Any, wire: WireFormat, capability: int) -> str:
    """Return what a kernel becomes for a format."""
    payload = PAYLOADS.get(wire.name, "*fp16")
    # What is encoded are gradients; what is summed and encoded, wires.
    given = "*fp32" if kernel is kernels.encode_kernel else payload
    types = {**TYPES, "payload": payload, "given": given}
    constants = kernels.constants(
        wire,
        split=wire.block > 1,
        writes="SHIFT" in kernel.arg_names,
        BEFORE=wire.needs_error_feedback,
        FED_BACK=wire.needs_error_feedback,
        HEAD=True,
    )
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i64") for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=kernels.OPTIONS)
    return str(compiled.asm["ptx"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--formats", nargs="+", default=list(WIRE_FORMATS))
    given = parser.parse_args()
    for capability in given.capabilities:
        for kernel in KERNELS:
            for name in given.formats:
                lines = ptx(kernel, WIRE_FORMATS[name], capability).splitlines()
                fused = sum("fma.rn.f32" in line for line in lines)
                print(capability, kernel.fn.__name__, name, fused, flush=True)


if __name__ == "__main__":
    main()
