"""Compile the simulated accelerator once; ``python -m tests.simulated.build`` builds it.

The library lies in ``build/simulated`` under a name made of the versions of torch, Python and the
compiler, the flags and the sources: nothing is compiled where nothing changed. A lock lets one
process build while others wait. This module imports no torch.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOR_TORCH", "Unavailable", "library"]

FOR_TORCH = "2.13"
SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).parents[2] / "build" / "simulated"
FLAGS = (
    "-std=c++20 -O1 -fPIC -fvisibility=hidden -w -DUSE_DISTRIBUTED -DUSE_C10D_GLOO "
    "-DTORCH_EXTENSION_NAME=sim"
)
JOBS = 2


class Unavailable(Exception):
    """Why there can be no simulated accelerator here."""


@dataclass(frozen=True)
class Tools:
    """What the library is made with."""

    compiler: list[str]
    torch: Path
    python: Path
    key: str


def _tools() -> Tools:
    version = importlib.metadata.version("torch")
    if version.split("+")[0].split(".")[:2] != FOR_TORCH.split("."):
        raise Unavailable(f"the simulated accelerator is for torch {FOR_TORCH}, this is {version}")
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"the simulated accelerator is for Linux, this is {sys.platform}")
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    found = [each for each in map(shlex.split, names) if shutil.which(each[0])]
    if not found:
        raise Unavailable(f"no C++ compiler ({', '.join(names)}) for the simulated accelerator")
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise Unavailable(f"no Python.h in {python} for the simulated accelerator")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    compiled_by = subprocess.run(
        [*found[0], "--version"], capture_output=True, text=True, check=True
    ).stdout
    key = "\n".join([version, sys.version, compiled_by, FLAGS])
    return Tools(found[0], Path(spec.origin).parent, python, key)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def library() -> Path:
    """The compiled library, built now if need be.

    Raises:
        Unavailable: Another torch, or no compiler.
        RuntimeError: The compiler refused the sources.
    """
    tools = _tools()
    sources = sorted(SOURCES.glob("*.cpp"))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    objects = {
        source: FOLDER
        / f"{source.stem}-{_digest(tools.key.encode(), headers, source.read_bytes())}.o"
        for source in sources
    }
    name = _digest(*(path.name.encode() for path in objects.values()))
    built = FOLDER / name / f"sim{sysconfig.get_config_var('EXT_SUFFIX')}"
    if built.exists():
        return built
    with _lock():
        if not built.exists():
            _build(tools, objects, built)
    return built


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(tools: Tools, objects: dict[Path, Path], built: Path) -> None:
    include = [
        f"-I{folder}"
        for folder in (
            tools.torch / "include",
            tools.torch / "include/torch/csrc/api/include",
            tools.python,
        )
    ]

    def compile_one(source: Path) -> None:
        if not objects[source].exists():
            _run([*tools.compiler, *FLAGS.split(), *include, "-c", str(source)], objects[source])

    # The largest first, so that no core waits at the end.
    order = sorted(objects, key=lambda path: -path.stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(JOBS) as jobs:
        list(jobs.map(compile_one, order))
    libraries = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")]
    where = tools.torch / "lib"
    built.parent.mkdir(exist_ok=True)
    _run(
        [*tools.compiler, "-shared", *map(str, objects.values()), f"-L{where}", *libraries]
        + [f"-Wl,-rpath,{where}"],
        built,
    )
    for old in FOLDER.glob("*.o"):
        if old not in objects.values():
            old.unlink()


def _run(command: list[str], result: Path) -> None:
    unfinished = result.with_name(f"{result.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-6000:]}")
    unfinished.rename(result)


def main() -> None:
    start = time.monotonic()
    try:
        path = library()
    except Unavailable as error:
        print(f"not built: {error}; tests that need it are skipped")
        return
    print(f"{path.relative_to(FOLDER.parents[1])}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
