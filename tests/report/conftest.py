"""Fixtures of the report tests: each test must restore the thread's autocast state."""

from tests.autocast.conftest import _state_is_restored, fresh_dynamo

__all__ = ["_state_is_restored", "fresh_dynamo"]
