"""``--help`` and shell completion: every flag once, in its group, in at most two lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from launch.config import Config, Shape
from launch.help import GROUPS, help_text
from launch.train import main
from tests.launch import jobs

FLAGS = [f.name for kind in (Config, Shape) for f in fields(kind) if f.name != "shape"]


def _entries(width: int) -> dict[str, list[str]]:
    """The lines of each flag."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in help_text(width).splitlines():
        if start := re.match(r"  --([\w-]+)", line):
            name = start[1]
            assert name not in found, "twice"
            found[name] = [line]
        elif line.startswith("      ") and name:
            found[name].append(line)
    return found


def test_every_flag_is_in_one_group_and_in_the_help():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(FLAGS)
    assert [*_entries(100)] == [name.replace("_", "-") for name in grouped]


def test_no_flag_takes_more_than_two_lines():
    assert {name: len(lines) for name, lines in _entries(100).items() if len(lines) > 2} == {}
    assert max(map(len, help_text(100).splitlines())) <= 100


def test_a_default_is_reported_once_and_nothing_is_none():
    entries = {name: " ".join(lines) for name, lines in _entries(100).items()}
    assert "None" not in help_text(100)
    for kind in (Config, Shape):
        for each in fields(kind):
            text = entries.get(each.name.replace("_", "-"), "")
            shown = len(re.findall(r"Default: |\[[^\]]*\]$", text))
            plain = each.default in (None, ()) or each.default is False
            assert shown <= 1, each.name
            assert each.name == "shape" or plain or shown == 1, each.name
    assert entries["lr"].endswith("[0.004]")
    assert entries["seed"].endswith("[0]")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_command_prints_it_and_exits_with_0(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 0
    assert "parallelism:\n  --strategy " in capsys.readouterr().out


def _completions(line: str, script: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    ask = f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}\n"
    done = subprocess.run(
        ["bash", "-c", f'{script}\n{ask}_launch_train; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_flags_and_values(capsys):
    with pytest.raises(SystemExit):
        main(["--completion", "bash"])
    script = capsys.readouterr().out
    start = "torchrun --nproc-per-node 2 launch/train.py"
    assert _completions(f"{start} --checkpoint-", script) == [
        "--checkpoint-activations",
        "--checkpoint-every",
    ]
    assert _completions(f"{start} --precision ", script) == ["fp32", "fp16", "bf16"]
    assert _completions(f"{start} --precision b", script) == ["bf16"]
    assert _completions(f"{start} --data ", script) == []  # files, as bash has it
    assert _completions("python other.py --checkpoint-", script) == []


def test_a_shell_it_is_not_made_for_is_refused(capsys):
    assert main(["--completion", "fish"]) == 2
    assert capsys.readouterr().err == "error: --completion fish: it must be bash or zsh\n"


def test_the_page_names_every_flag_as_the_help_does():
    pages = (jobs.ROOT / "docs").glob("*.md")
    known = {f"--{name.replace('_', '-')}" for name in FLAGS}
    text = "\n".join(path.read_text() for path in pages if path.name == "training.md")
    named = set(re.findall(r"`(--[a-z][\w-]*)", text))
    others = {"--help", "--completion", "--max-restarts", "--nproc-per-node", "--rdzv-id"}
    assert named - known - others == set()
    assert Path(jobs.SCRIPT).is_file()
