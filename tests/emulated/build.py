"""Builds the emulated devices' library once, and keeps it for the next runs."""

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
    """There is nothing here to build the library with."""


def built_library() -> Path:
    """Return the path of the library, which is built where it has not been for these sources and this torch.

    Raises:
        NoCompiler: If it would have to be built, and there is no C++ compiler.
    """
    import torch

    headers = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.h")))
    same = " ".join([torch.__version__, torch.__file__, *FLAGS]).encode() + headers
    objects = {source: KEPT / f"{source.stem}-{_key(same, source.read_bytes())}.o" for source in HERE.glob("*.cpp")}
    library = KEPT / f"emulated-{_key(*sorted(path.name.encode() for path in objects.values()))}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("no C++ compiler (g++, or the one that CXX names) to build the emulated devices with")
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(KEPT / "lock"):
        if not library.exists():
            _build(compiler, Path(torch.__file__).parent, objects, library)
    return library


def _key(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _build(compiler: str, torch_folder: Path, objects: dict[Path, Path], library: Path) -> None:
    include, libraries = torch_folder / "include", torch_folder / "lib"
    compiling = [compiler, *FLAGS, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", "-c"]
    missing = {source: made for source, made in objects.items() if not made.exists()}
    running = [
        subprocess.Popen([*compiling, str(source), "-o", f"{made}.part"], stderr=subprocess.PIPE, text=True)
        for source, made in missing.items()
    ]
    said = [process.communicate()[1] for process in running]
    for process, made in zip(running, missing.values(), strict=True):
        if process.returncode == 0:
            Path(f"{made}.part").rename(made)
    if any(process.returncode for process in running):
        raise RuntimeError("the emulated devices can't be built:\n" + "".join(said)[-4000:])
    link = [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([compiler, "-shared", *map(str, objects.values()), *link, "-o", f"{library}.part"], check=True)
    Path(f"{library}.part").rename(library)
