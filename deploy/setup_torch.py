"""Install torch the way this machine needs it: the CPU build where there is no NVIDIA GPU.

Run with the Python of the environment to fill. On some platforms and indexes plain `torch` brings gigabytes
of CUDA libraries, on others a CPU wheel; `pip install --dry-run --report` tells which before anything large
is downloaded. Standard library only: it runs before anything is installed.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANGE = "torch>=2.8,<3"
PINNED = "torch==2.13.*"
_TAKES = "(about 200 MB to download, a minute or two)"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    if (installed := installed_torch()) is not None:
        print(f"torch {installed} is installed already")
        return 0
    if has_nvidia_gpu():
        print("an NVIDIA GPU is here: installing torch with CUDA (about 3 GB to download)", flush=True)
        return pip("install", RANGE)
    plan = dry_run(PINNED)
    if plan is not None and not cuda_packages(plan):
        print(f"no NVIDIA GPU: {PINNED} resolves to a build without CUDA, installing it {_TAKES}", flush=True)
        return pip("install", PINNED)
    print(f"no NVIDIA GPU: installing the CPU build {_TAKES}", flush=True)
    return pip("install", RANGE, "--index-url", CPU_INDEX)


def installed_torch() -> str | None:
    """Version of an installed torch in our range; None when there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return version if (2, 8) <= (major, minor) < (3, 0) else None


def has_nvidia_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def dry_run(requirement: str) -> dict[str, Any] | None:
    """pip's report on what it would install; None when the requirement cannot be resolved here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        if pip("install", "--dry-run", "--report", str(report), requirement, loud=False):
            return None
        return json.loads(report.read_text())


def cuda_packages(report: dict[str, Any]) -> list[str]:
    """Names in a pip report that only a CUDA build of torch needs."""
    names = [item["metadata"]["name"].lower() for item in report["install"]]
    return [name for name in names if name.startswith(("nvidia", "cuda")) or name == "triton"]


def pip(*args: str, loud: bool = True) -> int:
    command = [sys.executable, "-m", "pip", *args, "--quiet", "--disable-pip-version-check", "--no-input"]
    return subprocess.run(command, check=False, stderr=None if loud else subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
