"""Planted faults stay valid: each fits today's code, and names a test that exists."""

import ast
import functools
import re
from collections import Counter
from types import CodeType
from typing import Any

import pytest

from tests.mutants.planted import ROOT, Fault, load_faults
from tests.mutants.transformations import PlantError, Transformation

FAULTS = load_faults()


@functools.cache
def test_functions(file: str) -> frozenset[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return frozenset(name for name in names if name.startswith("test_"))


# pytest would collect the helper because of its name.
test_functions.__test__ = False  # type: ignore[attr-defined]


def instructions(code: CodeType) -> list[object]:
    """Return the bytecode, names and constants of compiled code, without its line numbers."""
    parts: list[object] = [code.co_code, code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(instructions(constant))
        else:
            parts.append((type(constant), repr(constant)))
    return parts


@functools.lru_cache(maxsize=4)
def read_with_instructions(file: str) -> tuple[str, list[object]]:
    """Return the source of a file, and the instructions of its compiled code."""
    source = (ROOT / file).read_text()
    code = compile(source, file, "exec", dont_inherit=True)
    return source, instructions(code)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_transformation_has_one_place_and_changes_the_compiled_code(fault: Fault) -> None:
    source, instructions_of_source = read_with_instructions(fault.file)
    planted = fault.plant(source)  # raises if there is no place, or more than one
    planted_code = compile(planted, fault.file, "exec", dont_inherit=True)
    assert instructions(planted_code) != instructions_of_source


def test_each_fault_names_a_test_that_exists() -> None:
    missing = []
    for fault in FAULTS:
        file, _, test = fault.found_by.partition("::")
        function = test.partition("[")[0]
        if not (ROOT / file).is_file() or function not in test_functions(file):
            missing.append(f"{fault.room}: {fault.name}: {fault.found_by}")
    assert missing == []


def test_each_fault_has_a_sentence_about_the_loss() -> None:
    """A sentence has a capital letter, five words or more, and a full stop at its end."""
    sentence = re.compile(r"[A-Z]\S* (?:\S+ ){3,}\S+\.")
    assert [fault.name for fault in FAULTS if not sentence.fullmatch(fault.loses)] == []


def test_names_of_faults_are_unique_and_no_room_is_empty() -> None:
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []
    rooms = {path.stem for path in (ROOT / "tests" / "mutants").glob("*.toml")}
    assert {fault.room for fault in FAULTS} == rooms


SOURCE = '''\
class Counter:
    def count(self, taken, é="é"):  # a comment that stays
        """Count one step."""
        if taken == 1 and self.on:
            self.total += taken
        é.reset(); self.log("é", min(taken, 2))
        return self.total
'''


def changed_line(transformation: Transformation) -> str:
    """Apply a transformation to the source; return the only line that changed."""
    lines = SOURCE.splitlines()
    planted = transformation.apply(SOURCE).splitlines()
    changed = [new for old, new in zip(lines, planted, strict=True) if old != new]
    assert len(changed) == 1
    return changed[0].strip()


def test_a_condition_is_negated() -> None:
    negation = Transformation("Counter.count", "negate_condition", pattern="self.on")
    line = changed_line(negation)
    assert line == "if taken == 1 and (not self.on):"


def test_a_comparison_becomes_its_opposite() -> None:
    swap = Transformation("Counter.count", "swap_comparison", pattern="_ == _")
    line = changed_line(swap)
    assert line == "if (taken != 1) and self.on:"


def test_an_operand_is_kept() -> None:
    operand = Transformation("Counter.count", "keep_operand", pattern="_ and _", operand=2)
    line = changed_line(operand)
    assert line == "if (self.on):"


def test_an_argument_is_kept_behind_letters_of_several_bytes() -> None:
    argument = Transformation("Counter.count", "keep_operand", call="min")
    line = changed_line(argument)
    assert line == 'é.reset(); self.log("é", (taken))'


def test_the_object_of_a_method_is_kept() -> None:
    receiver = Transformation("Counter.count", "keep_receiver", call="log")
    line = changed_line(receiver)
    assert line == "é.reset(); (self)"


def test_a_called_function_is_renamed() -> None:
    rename = Transformation("Counter.count", "rename", call="min", value="max")
    line = changed_line(rename)
    assert line == 'é.reset(); self.log("é", (max)(taken, 2))'


def test_an_attribute_is_renamed() -> None:
    rename = Transformation("Counter.count", "rename", pattern="self.on", value="off")
    line = changed_line(rename)
    assert line == "if taken == 1 and (self.off):"


def test_a_statement_becomes_pass() -> None:
    drop = Transformation("Counter.count", "drop_statement", pattern="_ += _")
    line = changed_line(drop)
    assert line == "pass"


def test_the_value_of_an_assignment_is_replaced() -> None:
    value = Transformation("Counter.count", "replace_value", pattern="_ += _", value=3)
    line = changed_line(value)
    assert line == "self.total += (3)"


def test_a_call_becomes_none() -> None:
    drop = Transformation("Counter.count", "drop_call", call="reset")
    line = changed_line(drop)
    assert line == '(None); self.log("é", min(taken, 2))'


def test_a_context_manager_becomes_one_without_an_effect() -> None:
    drop = Transformation("f", "drop_context", call="lock")
    planted = drop.apply("def f():\n    with lock(), open('x') as file:\n        pass\n")
    no_context = '(__import__("contextlib").nullcontext())'
    assert planted == f"def f():\n    with {no_context}, open('x') as file:\n        pass\n"


def test_the_second_constant_of_a_value_is_replaced() -> None:
    constant = Transformation("Counter.count", "replace_constant", constant="é", nth=2, value="e")
    line = changed_line(constant)
    assert line == "é.reset(); self.log(('e'), min(taken, 2))"


@pytest.mark.parametrize(
    "selector",
    [{"call": "absent"}, {"call": "min", "nth": 2}, {"pattern": "self._"}, {"constant": 2.0}],
)
def test_a_place_that_is_not_there_is_refused(selector: dict[str, Any]) -> None:
    transformation = Transformation("Counter.count", "replace_value", value=0, **selector)
    with pytest.raises(PlantError, match="places match"):
        transformation.apply(SOURCE)


def test_a_place_that_is_there_twice_is_refused() -> None:
    transformation = Transformation("Counter.count", "replace_value", pattern="self.total", value=0)
    with pytest.raises(PlantError, match="2 places match"):
        transformation.apply(SOURCE)


def test_an_operation_that_does_not_fit_its_place_is_refused() -> None:
    negation = Transformation("Counter.count", "negate_condition", pattern="_ += _")
    with pytest.raises(PlantError, match="not a condition"):
        negation.apply(SOURCE)


def test_the_body_of_a_function_is_replaced_as_a_whole() -> None:
    return_none = Transformation("f", "return_none")
    planted = return_none.apply("def f(x):  # a comment\n    y = 1\n    return y\n")
    assert planted == "def f(x):  # a comment\n    return None\n"


def test_a_function_that_is_there_twice_is_refused() -> None:
    with pytest.raises(PlantError, match="2 definitions of f"):
        Transformation("f", "return_none").apply("def f(): pass\ndef f(): pass\n")
