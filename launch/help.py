"""What ``--help`` prints: the flags in groups, each with its values, its default and two lines."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal

from launch.config import Config, Shape
from launch.errors import UsageError

__all__ = ["GROUPS", "completion", "help_text"]

GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *("model", "model_args", "layers", "heads", "width", "block", "dropout", "patch"),
        *("compile", "checkpoint_activations"),
    ),
    "data": ("data", "image_size", "batch", "accumulate", "seed"),
    "precision": (
        *("precision", "opt_level", "keep_batchnorm_fp32", "master_weights", "loss_scale"),
        *("init_scale", "growth_interval"),
    ),
    "parallelism": (
        *("strategy", "replicas", "shards", "tp", "gather_fp32", "comm_hook", "backend"),
        *("device", "timeout"),
    ),
    "optimisation": (
        *("steps", "lr", "warmup", "final_lr", "weight_decay", "eps", "clip", "adamw"),
        *("max_minutes", "allow_nan"),
    ),
    "checkpoints": (
        *("run_dir", "resume", "auto_resume", "overwrite", "config", "checkpoint_every"),
        "keep_checkpoints",
    ),
    "reporting": (
        *("log_every", "evaluate_every", "validation_windows", "report", "profile"),
        *("tensorboard", "wandb"),
    ),
}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_COLUMN = 32


def help_text(width: int = 100) -> str:
    """Return the page, in lines of at most ``width`` characters."""
    flags, about = _flags(), _descriptions()
    lines = ["usage: [torchrun --nproc-per-node N] launch/train.py [flags]", ""]
    lines += textwrap.wrap(inspect.getdoc(Config) or "", width)
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _entry(name, flags[name], about[name], width)
    lines += ["", "--completion bash (or zsh) prints what makes that shell complete these flags."]
    return "\n".join(lines) + "\n"


def completion(shell: str) -> str:
    """Return what makes a shell complete the flags, behind python and torchrun too.

    Raises:
        UsageError: It is made for another shell.
    """
    if shell not in ("bash", "zsh"):
        raise UsageError(f"--completion {shell}: it must be bash or zsh")
    flags = _flags()
    words = " ".join(_spelled(name) for name in flags)
    cases = "".join(
        f'        {_spelled(name)}) words="{" ".join(choices)}" ;;\n'
        for name, each in flags.items()
        if (choices := _choices(each))
    )
    zsh = "autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return zsh + _COMPLETION.format(words=words, cases=cases)


_COMPLETION = """\
# eval "$(python launch/train.py --completion bash)"
_launch_train() {{
    local words="{words}" current="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=()
    [[ " ${{COMP_WORDS[*]:0:COMP_CWORD}} " == *"launch/train.py "* ]] || return 0
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}        --*) [[ "$current" == -* ]] || return 0 ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _launch_train python python3 torchrun launch/train.py
"""


def _flags() -> dict[str, Field[Any]]:
    """Return every field that is a flag, by name."""
    found = {each.name: each for kind in (Config, Shape) for each in fields(kind)}
    del found["shape"]
    return found


def _descriptions() -> dict[str, str]:
    """Return the string below each field."""
    found = {}
    for kind in (Config, Shape):
        [made] = ast.parse(inspect.getsource(kind)).body
        assert isinstance(made, ast.ClassDef)
        for line, below in zip(made.body, made.body[1:], strict=False):
            match line, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _entry(name: str, flag: Field[Any], about: str, width: int) -> Iterator[str]:
    default = flag.default
    if default is not MISSING and default is not None and default is not False and default != ():
        about = f"{about} [{default:g}]" if isinstance(default, float) else f"{about} [{default}]"
    first = f"  {_spelled(name)} {_values(flag)}".rstrip()
    wrapped = textwrap.wrap(about, width - _COLUMN)
    if len(first) > _COLUMN - 2:  # the text begins on a line of its own, further to the left
        yield first
        yield from (f"        {line}" for line in textwrap.wrap(about, width - 8))
        return
    yield first.ljust(_COLUMN) + wrapped[0]
    yield from (" " * _COLUMN + line for line in wrapped[1:])


def _values(flag: Field[Any]) -> str:
    """Return what stands behind a flag; nothing behind one that is on or off."""
    if choices := _choices(flag):
        return "{" + ",".join(choices) + "}"
    kind = _kind(flag)
    if kind is bool:
        return ""
    return "NAME=VALUE ..." if typing.get_origin(kind) is tuple else _METAVARS[kind]


def _choices(flag: Field[Any]) -> tuple[str, ...]:
    kind = _kind(flag)
    if typing.get_origin(kind) is Literal:
        return tuple(map(str, typing.get_args(kind)))
    return ("True", "False") if kind is bool and flag.default is None else ()


def _kind(flag: Field[Any]) -> Any:
    """Return a field's type without None."""
    owner = Config if flag.name in Config.__dataclass_fields__ else Shape
    kind = typing.get_type_hints(owner)[flag.name]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        [kind] = [each for each in typing.get_args(kind) if each is not type(None)]
    return kind


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
