"""Gradient communication in fewer bytes: fp16 on the wire, fp32 in the sum."""

__all__: list[str] = []
