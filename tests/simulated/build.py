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
SOURCES = sorted(
    (Path(__file__).parent / "csrc").iterdir(), key=lambda it: (-it.stat().st_size, it)
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
    """Why there can be no simulated accelerator here."""


def library() -> Path:
    """The compiled library, built now if need be.

    Raises:
        Unavailable: Another torch, or no compiler.
        RuntimeError: The compiler refused the sources.
    """
    version = importlib.metadata.version("torch")
    named = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    compilers = [each for each in map(shlex.split, named) if shutil.which(each[0])]
    for is_there, needed in (
        (version.split("+")[0].split(".")[:2] == FOR_TORCH.split("."), f"torch {FOR_TORCH}"),
        (sys.platform.startswith("linux"), "Linux"),
        (compilers, f"a C++ compiler ({', '.join(named)})"),
        ((PYTHON / "Python.h").exists(), f"{PYTHON}/Python.h"),
    ):
        if not is_there:
            raise Unavailable(
                f"the simulated accelerator needs {needed}; this is torch {version} "
                f"on {sys.platform}"
            )
    digest = hashlib.sha256(
        repr([version, sys.version, str(Path(sys.prefix).resolve()), FLAGS]).encode()
    )
    for part in (_run([*compilers[0], "--version"]), *(p.read_bytes() for p in SOURCES)):
        digest.update(part)
    built = FOLDER / digest.hexdigest()[:16] / f"sim{sysconfig.get_config_var('EXT_SUFFIX')}"
    built.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(compilers[0], built)
    return built


def _build(compiler: list[str], built: Path) -> None:
    torch = Path(importlib.util.find_spec("torch").origin).resolve().parent  # type: ignore[union-attr, arg-type]
    folders = (torch / "include", torch / "include/torch/csrc/api/include", PYTHON)
    # The largest first, so that no core waits at the end.
    sources = [source for source in SOURCES if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        compiled = [*compiler, *FLAGS, *(f"-I{each}" for each in folders), "-c"]
        with concurrent.futures.ThreadPoolExecutor(JOBS) as jobs:
            commands = [[*compiled, s, "-o", o] for s, o in zip(sources, objects, strict=True)]
            list(jobs.map(_run, commands))
        linked = [*objects, f"-L{torch}/lib", *LIBRARIES, f"-Wl,-rpath,{torch}/lib"]
        _run([*compiler, "-shared", *linked, "-o", f"{folder}/linked"])
        Path(folder, "linked").rename(built)


def _run(command: list[str | Path]) -> bytes:
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = done.stderr.decode()[-6000:]
        raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{said}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(library())
    except Unavailable as error:
        print(f"not built: {error}; tests that need it are skipped")
