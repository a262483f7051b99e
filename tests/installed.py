"""Install a wheel or an sdist outside of the tree, and use it as a user would.

python -m tests.installed dist/*.whl dist/*.tar.gz

torch, mypy and the build backend are read from this interpreter.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "first_run.py"
LOOK = """
import importlib.metadata, pathlib, sys, distamp
installed = pathlib.Path(distamp.__file__).resolve()
assert installed.is_relative_to(pathlib.Path(sys.prefix).resolve()), installed
assert importlib.metadata.version("distamp") == distamp.__version__
required = [line for line in importlib.metadata.requires("distamp") if "extra ==" not in line]
assert len(required) == 1 and required[0].startswith("torch>="), required
missing = [name for name in distamp.__all__ if not hasattr(distamp, name)]
assert not missing, missing
print("distamp", distamp.__version__, "has all its public names")
"""


def check(built: Path, folder: Path) -> None:
    """Install a wheel or an sdist into a new virtual environment, outside of the tree; use it.

    Raises:
        subprocess.CalledProcessError: One of the programs failed.
    """
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    # A path alone: the .pth files in it, such as that of an editable install, are not read.
    site = sysconfig.get_path("purelib", vars={"base": str(venv)})
    (Path(site) / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # pip reads neither an index nor the tree.
    apart = ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    shutil.copy(PROGRAM, folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        ["-m", "pip", "install", "--quiet", *apart, str(built)],
        ["-c", LOOK],
        [PROGRAM.name],
        ["-m", "distamp", "doctor"],
        # distamp is py.typed, so a user's program is checked against its types.
        ["-m", "mypy", "--strict", "--no-incremental", PROGRAM.name],
    ):
        subprocess.run([python, *command], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as temporary:
            print(f"{name}:", flush=True)
            built = Path(name).resolve()
            check(built, Path(temporary))
