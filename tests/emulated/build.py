"""Builds the emulated devices' library once, and reuses it in later runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "build" / "emulated"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w"]


class NoCompiler(Exception):
    """This machine has no compiler for the library."""


def built_library() -> Path:
    """Return the path of the library, which is built where it has not been for these sources and this torch.

    Raises:
        NoCompiler: If it would have to be built, and there is no C++ compiler.
    """
    import torch

    contents = [path.read_bytes() for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])]
    same = " ".join([torch.__version__, torch.__file__, *FLAGS]).encode()
    key = hashlib.sha256(b"\0".join([same, *contents])).hexdigest()[:16]
    library = KEPT / f"emulated-{key}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("no C++ compiler (g++, or $CXX) to build the emulated devices")
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(KEPT / "lock"):
        if not library.exists():
            _build(compiler, Path(torch.__file__).parent, library)
    return library


def _build(compiler: str, torch_folder: Path, library: Path) -> None:
    """Compile all sources together, because torch's headers take four fifths of the time of each."""
    include, libraries = torch_folder / "include", torch_folder / "lib"
    headers = [f"-I{path}" for path in (HERE, include, include / "torch/csrc/api/include")]
    link = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    made = subprocess.run(
        [compiler, *FLAGS, *headers, "-shared", "-x", "c++", "-", "-x", "none", *link, "-o", f"{library}.part"],
        input="".join(f'#include "{path.name}"\n' for path in sorted(HERE.glob("*.cpp"))),
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError("the emulated devices can't be built:\n" + made.stderr[-4000:])
    Path(f"{library}.part").rename(library)
