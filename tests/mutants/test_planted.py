"""Planted faults do not rot: each still has a place in today's code."""

from collections import Counter

from tests.mutants.planted import ROOT, planted, recorded


def test_every_fault_can_be_planted():
    for fault in planted():
        compile(fault.mutated((ROOT / fault.file).read_text()), fault.file, "exec")
        assert fault.by != fault.replace


def test_every_room_has_five_and_tests_that_are_there():
    faults = planted()
    assert min(Counter(fault.room for fault in faults).values()) >= 5
    assert {fault.name for fault in faults} <= recorded().keys()
    assert all(any(path for name in fault.tests for path in ROOT.glob(name)) for fault in faults)


def test_the_tests_on_record_are_there():
    """One that was renamed or dropped finds nothing."""
    for fault, test in recorded().items():
        file, _, function = test.partition("::")
        function = function.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in (ROOT / file).read_text(), fault
