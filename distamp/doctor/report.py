"""All of it as one value, as text for a bug report and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distamp.doctor.environment import backends, device_type, devices, settings, versions
from distamp.doctor.parts import Part, tried_parts
from distamp.doctor.ranks import Ranks, compared_ranks, under_torchrun
from distamp.doctor.speed import Speed, measured_speeds
from distamp.errors import SettingError

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """What distamp finds on this machine. ``str`` makes the text for a bug report.

    Like ``python -m torch.utils.collect_env``, it lists versions; beyond that it tries every part,
    times dtypes and compares ranks. It holds no host names, user names or paths.

    Args:
        versions: By name of the package.
        devices: A line for each.
        backends: Which process groups can be made.
        settings: What was set in torch and in the environment.
        parts: Each part of distamp, tried.
        speeds: How fast dtypes are; empty if not measured.
        ranks: What torchrun's ranks have in common; None without torchrun.
        problems: What does not work and should; the exit code is 1 if there is any.
    """

    versions: Mapping[str, str]
    devices: Sequence[str]
    backends: Mapping[str, bool]
    settings: Mapping[str, str]
    parts: Sequence[Part]
    speeds: Sequence[Speed]
    ranks: Ranks | None
    problems: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts of them."""
        return asdict(self)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        lines = ["distamp doctor", ""]
        lines += _table("Versions", self.versions.items())
        lines += ["Devices", *(f"  {line}" for line in self.devices), ""]
        lines += _table("Backends", ((k, "yes" if v else "no") for k, v in self.backends.items()))
        lines += _table("Settings", self.settings.items())
        lines += _table("Parts", ((p.name, f"{p.state:8} {p.why}".rstrip()) for p in self.parts))
        if self.speeds:
            lines += _table("Dtypes, measured now", map(_speed, self.speeds))
        if self.ranks is not None:
            lines += _ranks(self.ranks)
        lines += ["Problems", *(f"  {each}" for each in self.problems or ["none"])]
        return "\n".join(lines)


def _table(title: str, rows: Any) -> list[str]:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [title, *(f"  {name:{width}}  {value}" for name, value in rows), ""]


def _speed(speed: Speed) -> tuple[str, str]:
    name = f"{speed.op} {speed.dtype}"
    if speed.milliseconds is None or speed.of_float32 is None:
        return name, f"{speed.verdict}: {speed.why}"
    ratio = "" if speed.dtype == "float32" else f"  {speed.of_float32:.2f} of float32's time"
    verdict = "" if speed.dtype == "float32" else f"  {speed.verdict}"
    return name, f"{speed.milliseconds:8.3f} ms{ratio}{verdict}"


def _ranks(ranks: Ranks) -> list[str]:
    line = f"  rank {ranks.rank} of {ranks.size}"
    alike = "all alike" if not (ranks.errors or ranks.notes) else ""
    return ["Ranks", f"{line}{', ' if alike else ''}{alike}", *(f"  {n}" for n in ranks.notes), ""]


def diagnose(
    require: Sequence[str] = (), *, measure: bool = True, timeout: float = 30.0
) -> Diagnosis:
    """Look at this machine, and under torchrun at all ranks; every rank calls it then.

    Args:
        require: Names of parts (`Diagnosis.parts`) that must work; one that does not is a problem.
        measure: Whether to time dtypes, which takes at most some five seconds.
        timeout: Seconds that ranks wait for each other.

    Raises:
        SettingError: ``require`` names no part.
    """
    device = device_type()
    parts = tried_parts(device)
    unknown = [name for name in require if name not in {part.name for part in parts}]
    if unknown:
        raise SettingError(
            f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in parts)}"
        )
    problems = [
        f"{part.name} {part.state}: {part.why}"
        for part in parts
        if part.state == "broken" or (part.name in require and part.state != "works")
    ]
    about, chosen = versions(), settings()
    speeds = measured_speeds(device) if measure else []
    ranks = None
    if under_torchrun():
        ranks = compared_ranks({"versions": about, "settings": chosen}, device, timeout)
        problems += ranks.errors
    return Diagnosis(about, devices(), backends(), chosen, parts, speeds, ranks, problems)
