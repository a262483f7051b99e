"""Compile the simulated accelerator once; ``python -m tests.simulated.build`` builds it.

The library lies in ``build/simulated`` under a name made of the versions of torch, Python and the
compiler, the flags and the sources: nothing is compiled where nothing changed. A lock lets one
process build while others wait. This module imports no torch.
"""

import concurrent.futures
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
import tempfile
from pathlib import Path

__all__ = ["FOR_TORCH", "Unavailable", "library"]

FOR_TORCH = "2.13"
# The largest file comes first, so that no core waits at the end of a build.
SOURCES = sorted(
    (Path(__file__).parent / "csrc").iterdir(), key=lambda path: (-path.stat().st_size, path)
)
FOLDER = Path(__file__).parents[2] / "build" / "simulated"
PYTHON = Path(sysconfig.get_paths()["include"])
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=sim"),
]
LIBRARIES = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")]
JOBS = 2


class Unavailable(Exception):
    """There can be no simulated accelerator here; the message has the reason."""


def library() -> Path:
    """Return the path of the compiled library, and build it if it does not exist.

    Raises:
        Unavailable: Another torch, or no compiler.
        RuntimeError: The compiler refused the sources.
    """
    compiler = _find_compiler()
    digest = _digest(compiler)
    path = FOLDER / digest / f"sim{sysconfig.get_config_var('EXT_SUFFIX')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(compiler, path)
    return path


def _find_compiler() -> list[str]:
    """Return the command of a C++ compiler, or raise if the library cannot be built here."""
    if not _torch_version().startswith(f"{FOR_TORCH}."):
        raise _unavailable(f"torch {FOR_TORCH}")
    if not sys.platform.startswith("linux"):
        raise _unavailable("Linux")
    header = PYTHON / "Python.h"
    if not header.exists():
        raise _unavailable(str(header))
    candidates = ["c++", "g++", "clang++"]
    if "CXX" in os.environ:
        candidates = [os.environ["CXX"]]
    for candidate in candidates:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise _unavailable(f"a C++ compiler ({', '.join(candidates)})")


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _unavailable(need: str) -> Unavailable:
    return Unavailable(
        f"the simulated accelerator needs {need}; this is torch {_torch_version()} "
        f"on {sys.platform}"
    )


def _digest(compiler: list[str]) -> str:
    """Return a name for the versions, the flags and the sources of the library."""
    prefix = Path(sys.prefix).resolve()
    settings = [_torch_version(), sys.version, str(prefix), FLAGS]
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(_run([*compiler, "--version"]))
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: list[str], path: Path) -> None:
    torch = Path(importlib.util.find_spec("torch").origin).resolve().parent  # type: ignore[union-attr, arg-type]
    includes = [
        f"-I{torch}/include",
        f"-I{torch}/include/torch/csrc/api/include",
        f"-I{PYTHON}",
    ]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = []
        commands = []
        for source in SOURCES:
            if source.suffix == ".cpp":
                compiled = f"{folder}/{source.stem}.o"
                objects.append(compiled)
                commands.append([*compiler, *FLAGS, *includes, "-c", source, "-o", compiled])
        with concurrent.futures.ThreadPoolExecutor(JOBS) as jobs:
            list(jobs.map(_run, commands))
        linked = f"{folder}/linked"
        options = [f"-L{torch}/lib", *LIBRARIES, f"-Wl,-rpath,{torch}/lib"]
        _run([*compiler, "-shared", *objects, *options, "-o", linked])
        Path(linked).rename(path)


def _run(command: list[str | Path]) -> bytes:
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        errors = done.stderr.decode()[-6000:]
        raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{errors}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(library())
    except Unavailable as error:
        print(f"not built: {error}; tests that need it are skipped")
