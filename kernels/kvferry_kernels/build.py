"""Builds the CPU extension (`csrc/`) next to the package: `python -m kvferry_kernels.build`.

The same kernels are compiled for three instruction sets and chosen at run time, so one build serves every x86-64 machine;
elsewhere only the baseline exists. Without the extension everything works on plain torch operators.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "csrc"
COMMON_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math",
                "-fno-signed-zeros", "-freciprocal-math", "-Wall"]  # fmt: skip
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mprefer-vector-width=512",
    ],
}


def source_digest() -> str:
    """Digest of everything the binary depends on: sources, flags, torch."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, ISA_FLAGS, torch.__version__)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def library_path() -> Path:
    """Where the extension for these sources and this torch lies (or would lie)."""
    return PACKAGE / f"_cpu_{source_digest()}.so"


def build() -> Path:
    """Compile if needed and return the library's path. Raises RuntimeError with the compiler's words when it fails."""
    target = library_path()
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler found; install g++ (the engine also works without the extension, slower)")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    scratch = PACKAGE / "build"
    scratch.mkdir(exist_ok=True)
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    units: list[tuple[str, list[str]]] = [("bindings", [])]
    units += [(f"kernels_{isa}", flags) for isa, flags in ISA_FLAGS.items() if is_x86 or isa == "baseline"]
    commands = []
    for name, flags in units:
        output = scratch / f"{name}.o"
        commands.append(
            [compiler, *COMMON_FLAGS, *flags, abi, *includes, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(output)]
        )
    _run_all(commands)
    libraries = Path(torch.__file__).parent / "lib"
    partial = target.with_suffix(f".{os.getpid()}")
    objects = [str(scratch / f"{name}.o") for name, _ in units]
    _run_all(
        [
            [
                compiler,
                "-shared",
                "-fopenmp",
                *objects,
                f"-L{libraries}",
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
                "-o",
                str(partial),
            ]
        ]
    )
    partial.replace(target)
    for old in PACKAGE.glob("_cpu_*.so"):
        if old != target:
            old.unlink()
    shutil.rmtree(scratch)
    return target


def _run_all(commands: list[list[str]]) -> None:
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(output[-4000:])


def main() -> int:
    """Command line: build, say where the library is."""
    try:
        path = build()
    except RuntimeError as error:
        sys.stderr.write(f"error: the CPU extension did not build: {error}\n")
        return 1
    sys.stdout.write(f"{path.name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
