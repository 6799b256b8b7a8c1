"""Puts NVIDIA's disassembler beside this Python: the last one that reads sm_70, which no package brings but triton 3.6.0's wheel.

    python ci/fetch_nvdisasm.py

The wheel is downloaded with pip from wherever pip takes packages, and only the one program is kept: to install all of it would replace
the triton that a CUDA build of torch needs. Nothing is done when the program is there already.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

WHEEL = "triton==3.6.0"
MEMBER = "triton/backends/nvidia/bin/nvdisasm"


def fetch(to: Path) -> None:
    """Write the program to `to`, whole or not at all. Raises SystemExit with pip's words when the wheel cannot be had."""
    with TemporaryDirectory(dir=to.parent) as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"fetch_nvdisasm: pip cannot download {WHEEL}, whose disassembler reads sm_70:\n{done.stderr.strip()}")
        (wheel,) = Path(folder).glob("*.whl")
        part = Path(folder) / "nvdisasm"
        with zipfile.ZipFile(wheel) as packed:
            part.write_bytes(packed.read(MEMBER))
        part.chmod(0o755)
        part.replace(to)


if __name__ == "__main__":
    target = Path(sys.executable).parent / "nvdisasm"
    if not target.is_file():
        fetch(target)
