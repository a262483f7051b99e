"""What every test of reports leaves behind: the thread's autocast state as it found it."""

from tests.autocast.conftest import _nothing_leaks, fresh_dynamo

__all__ = ["_nothing_leaks", "fresh_dynamo"]
