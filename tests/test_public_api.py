"""Public names and signatures stay what they were, until somebody means them to change."""

from __future__ import annotations

import difflib

import distamp
from tests import public_api


def test_public_names_and_signatures_are_those_that_were_promised() -> None:
    promised = public_api.PROMISED.read_text().splitlines()
    changes = list(difflib.unified_diff(promised, public_api.lines(), "promised", "now", "", "", 0))
    assert changes == [], (
        "the public API changed. Where that is meant: follow the deprecation policy in "
        "CONTRIBUTING.md, note it in CHANGELOG.md, and run `python -m tests.public_api --write`"
    )


def test_every_exported_name_is_promised() -> None:
    promised = public_api.PROMISED.read_text()
    assert [name for name in distamp.__all__ if f"distamp.{name}" not in promised] == []


def test_a_changed_default_is_seen(monkeypatch) -> None:
    def cast_model(model: object, opt_level: str = "O1") -> object:
        return model

    monkeypatch.setattr(distamp, "cast_model", cast_model)
    promised = set(public_api.PROMISED.read_text().splitlines())
    changed = [line for line in public_api.lines() if line not in promised]
    assert changed == ["distamp.cast_model(model: object, opt_level: str = O1) -> object"]
