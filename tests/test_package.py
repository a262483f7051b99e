"""What gets installed: the package, its data and its types, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"distamp"}
    packaged = {name for name in names if name.startswith("distamp/")}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "distamp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == wanted
    assert "distamp/py.typed" in packaged


def test_the_core_needs_torch_alone(tmp_path: Path) -> None:
    """Importing distamp loads nothing that only an extra installs."""
    program = (
        "import sys, torch\n"
        "by_torch = set(sys.modules)\n"  # tqdm, where it is installed
        "import distamp\n"
        "extras = {'rich', 'matplotlib', 'tyro', 'fairscale', 'tqdm', 'hypothesis', 'pytest'}\n"
        "extras |= {'numpy', 'sklearn', 'PIL', 'transformers'}\n"
        "print(sorted(extras & (set(sys.modules) - by_torch)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"
