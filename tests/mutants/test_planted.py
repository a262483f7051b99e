"""Planted faults do not rot: each still has a place in today's code."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.planted import ROOT, planted, recorded

FAULTS = planted()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text()
    compile(fault.mutated(text), fault.file, "exec")
    assert fault.new != fault.old


def test_every_room_has_at_least_five_and_each_was_found():
    assert min(Counter(fault.room for fault in FAULTS).values()) >= 5
    assert {fault.name for fault in FAULTS} == recorded().keys()
    assert all((ROOT / name).exists() for fault in FAULTS for name in fault.tests)
