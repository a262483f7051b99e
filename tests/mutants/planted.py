"""Planted faults as data: a sentence about the loss, the test that finds it, and how to plant it.

A room is a TOML file of this folder; README.md says how to add a fault.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.transformations import Transformation

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A mistake in the code that a test finds.

    Attributes:
        name: A short name, unique among all rooms.
        room: The name of the TOML file.
        loses: A sentence about the loss for a user.
        found_by: The test that fails if the fault is planted, as pytest names it.
        file: The file of the transformation.
        transformation: The change that plants the fault.
    """

    name: str
    room: str
    loses: str
    found_by: str
    file: str
    transformation: Transformation

    def plant(self, source: str) -> str:
        """Return the source of the file with the fault in it."""
        return self.transformation.apply(source)


def load_faults() -> list[Fault]:
    """Return every fault, room by room."""
    faults = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            loses = fields.pop("loses")
            found_by = fields.pop("found_by")
            file = fields.pop("file")
            transformation = Transformation(**fields)
            faults.append(Fault(name, path.stem, loses, found_by, file, transformation))
    return faults
