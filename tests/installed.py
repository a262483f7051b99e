"""What was built, installed outside of the tree and used as a user would.

python -m tests.installed dist/*.whl dist/*.tar.gz             # torch is this interpreter's
python -m tests.installed --download-torch dist/*.whl          # pip finds torch by itself
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "first_run.py"
LOOK = """
import importlib.metadata, pathlib, sys, distamp
installed = pathlib.Path(distamp.__file__).resolve()
assert installed.is_relative_to(pathlib.Path(sys.prefix).resolve()), installed
assert importlib.metadata.version("distamp") == distamp.__version__
assert "torch" in importlib.metadata.requires("distamp")[0]
missing = [name for name in distamp.__all__ if not hasattr(distamp, name)]
assert not missing, missing
print("distamp", distamp.__version__, "has all its public names")
"""


def check(built: Path, folder: Path, download_torch: bool = False) -> str:
    """Install a wheel or an sdist into a new virtual environment and use it there.

    Args:
        built: The wheel or the sdist.
        folder: An empty one, outside of the tree.
        download_torch: Let pip install what the package needs. Otherwise torch, and what builds
            and checks, are those of this interpreter.

    Returns:
        What the programs printed.

    Raises:
        subprocess.CalledProcessError: One of them failed; its output was printed.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", str(built)]
    if not download_torch:
        site = subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        # A path alone: the .pth files in it, such as that of an editable install, are not read.
        others = sysconfig.get_path("purelib")
        (Path(site.strip()) / "torch.pth").write_text(f"{others}\n")
        # Neither the index nor what stands in the tree plays a part.
        install += ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    _run(install, folder)
    shutil.copy(PROGRAM, folder)
    used = [[str(python), "-c", LOOK], [str(python), PROGRAM.name]]
    if not download_torch:
        # distamp is py.typed, so a user's program is checked against its types.
        used.append([str(python), "-m", "mypy", "--strict", "--no-incremental", PROGRAM.name])
    return "".join(_run(command, folder) for command in used)


def _run(command: Sequence[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        print(done.stdout)
        done.check_returncode()
    return done.stdout


def main() -> None:
    """Check each file that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("built", nargs="+", type=Path)
    parser.add_argument("--download-torch", action="store_true")
    options = parser.parse_args()
    for built in options.built:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{built.name}:")
            print(check(built.resolve(), Path(folder), options.download_torch))


if __name__ == "__main__":
    main()
