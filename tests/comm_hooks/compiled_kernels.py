"""Compile every Triton kernel of some wire formats to PTX, which needs no GPU.

    python -m tests.comm_hooks.compiled_kernels 90 fp16 int8

For a compute capability, each kernel and each format a line, which ends with how many products are
fused with an addition, and so rounded once instead of twice, and with how many loads and stores
take 16 bytes at once, where runs are aligned; what cannot be compiled raises. To be run in a
process of its own, in which Triton does not interpret.
"""

import inspect
import itertools
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distamp.comm_hooks import WIRE_FORMATS, WireFormat, kernels
from distamp.comm_hooks.formats import Places

KERNELS = (
    kernels.encode_kernel,
    kernels.decode_kernel,
    kernels.sum_kernel,
    kernels.sum_encode_kernel,
)
PAYLOADS = {"int8": "*i8", "bf16": "*i16"}
# Of arguments that are no 64-bit integers.
TYPES = {
    **dict.fromkeys(("units", "given_units"), "*i16"),
    **dict.fromkeys(("more", "own", "rows"), "i32"),
    **dict.fromkeys(("values", "others", "out", "residual", "scale"), "*fp32"),
    "table": "*i64",
    "marks": "*i8",
    "inverse": "fp32",
}


def ptx(kernel: Any, wire: WireFormat, capability: int) -> str:
    """Return what a kernel becomes for a format."""
    payload = PAYLOADS.get(wire.name, "*fp16")
    types = {**TYPES, "payload": payload, "given": payload}
    writes = "FED" in kernel.arg_names
    aligned = Places(256, [(0, 0, 256)])
    constants = kernels.constants(wire, aligned, writes=writes, fed=wire.needs_error_feedback)
    constants["BLOCKS_"] = kernels.BLOCKS
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i64") for name in names
    }
    # As of buckets of a real model: what is specialized is a multiple of 16.
    hinted = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        attrs={(index,): [["tt.divisibility", 16]] for index in hinted},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=kernels.OPTIONS)
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    capability, *names = sys.argv[1:]
    for kernel, name in itertools.product(KERNELS, names):
        lines = ptx(kernel, WIRE_FORMATS[name], int(capability)).splitlines()
        fused = sum("fma.rn.f32" in line for line in lines)
        wide = sum("global.v4" in line for line in lines)
        print(kernel.fn.__name__, name, fused, wide)
