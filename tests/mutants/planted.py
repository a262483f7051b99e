"""Planted faults as data: an exact replacement in one file, and the tests that must find it."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Which test found a fault last, which is tried first.
RECORD = Path(__file__).parent / "found_by.json"


@dataclass(frozen=True)
class Fault:
    name: str
    room: str
    file: str
    loses: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text is {count} times in {self.file}")
        return text.replace(self.old, self.new)


def planted() -> list[Fault]:
    """Every fault, room by room: a room is a file of this folder."""
    faults = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        room = tomllib.loads(path.read_text())
        tests = tuple(room.pop("tests"))
        faults += [Fault(n, path.stem, **fault, tests=tests) for n, fault in room.items()]
    return faults


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(found: dict[str, str]) -> None:
    known = {fault.name for fault in planted()}
    kept = {name: test for name, test in (recorded() | found).items() if name in known}
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
