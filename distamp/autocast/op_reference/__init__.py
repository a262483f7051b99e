"""The op reference: what autocast does with each op, as documented, registered and observed."""

from distamp.autocast.op_reference.reference import NATIVE, OpReference, observe, op_reference

__all__ = ["NATIVE", "OpReference", "observe", "op_reference"]
