"""Replicas and bound modules: modules that compute in their caller's autocast state."""

from distamp.autocast.replicas.binding import bind, unbind
from distamp.autocast.replicas.data_parallel import DataParallel, parallel_apply

__all__ = ["DataParallel", "bind", "parallel_apply", "unbind"]
