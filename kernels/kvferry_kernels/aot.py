"""The compile gate: builds every Triton kernel for every supported GPU generation on a machine that has none.

    python -m kvferry_kernels.aot [--no-cache] [--only TEXT] [--jobs N]

It fails on register spills, on more shared memory than the target has, on kernels without variants, and on prefill code
for Hopper that does not use its matrix instruction. Results are kept in Triton's cache folder under a hash of the
package's source. What is compiled is declared beside each kernel (`variants`); what numerics a kernel has is for its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kvferry_kernels
from kvferry_kernels import device_math, variants
from kvferry_kernels.device_math import COMPILE_OPTIONS, is_interpreted
from kvferry_kernels.sampler import random_numbers
from kvferry_kernels.variants import Arch, Variant

TARGETS = {
    Arch.SM80: GPUTarget("cuda", 80, 32),
    Arch.SM90: GPUTarget("cuda", 90, 32),
    Arch.SM100: GPUTarget("cuda", 100, 32),
    Arch.GFX942: GPUTarget("hip", "gfx942", 64),
}
# What one program may use. The sm_80 tables also serve 8.6, 8.9 and 12.x, which have 99 KiB (CUDA programming guide, table
# of technical specifications); gfx942 has 64 KiB of LDS.
SHARED_LIMITS = {Arch.SM80: 99 << 10, Arch.SM90: 227 << 10, Arch.SM100: 227 << 10, Arch.GFX942: 64 << 10}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What compiling one variant for one target gave; `problem` is empty when the gate passes."""

    arch: str
    kernel: str
    label: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    has_wgmma: bool
    seconds: float
    problem: str


def op_modules() -> list[ModuleType]:
    """Return the Triton module of every op of the package."""
    packages = [info.name for info in pkgutil.iter_modules(kvferry_kernels.__path__) if info.ispkg]
    roots = [Path(root) for root in kvferry_kernels.__path__]
    return [
        importlib.import_module(f"kvferry_kernels.{name}.triton")
        for name in packages
        if any((root / name / "triton.py").exists() for root in roots)
    ]


def kernels_of(module: ModuleType) -> set[str]:
    """Return the names of the kernels a module defines; by convention they end in `_kernel`, device functions do not."""
    return {
        name
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def uncovered_kernels() -> list[str]:
    """Return kernels that no variant compiles for some target."""
    return [
        f"{module.__name__}.{name} on {arch}"
        for module in op_modules()
        for arch in Arch
        for name in sorted(kernels_of(module) - {variant.kernel.fn.__name__ for variant in module.variants(arch)})
    ]


def source_of(variant: Variant) -> ASTSource:
    """Return what Triton compiles for a variant, with the divisibility the JIT would find in real arguments."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if name in variant.types and variant.types[name] not in ("fp32", "i1") and name not in variant.unaligned
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    return ASTSource(variant.kernel, signature, variant.constants, attributes)


def check(arch: Arch, module_name: str, index: int) -> Result:
    """Compile variant number `index` of a module's list for `arch`; runs in a worker process."""
    variant = importlib.import_module(module_name).variants(arch)[index]
    options = {"num_warps": variant.launch.num_warps, "num_stages": variant.launch.num_stages, **COMPILE_OPTIONS}
    log = io.StringIO()
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source_of(variant), target=TARGETS[arch], options=options)
    seconds = time.perf_counter() - began
    text = log.getvalue() if arch is not Arch.GFX942 else compiled.asm["amdgcn"]
    registers, spill_bytes = (nvidia_usage if arch is not Arch.GFX942 else amd_usage)(text)
    has_wgmma = arch is Arch.SM90 and "wgmma" in compiled.asm["ptx"]
    shared = int(compiled.metadata.shared)
    problems = [
        text
        for failed, text in (
            (spill_bytes > 0, f"spills {spill_bytes} bytes"),
            (shared > SHARED_LIMITS[arch], f"shared memory above {SHARED_LIMITS[arch]}"),
            (variant.expect_wgmma and arch is Arch.SM90 and not has_wgmma, "no wgmma"),
        )
        if failed
    ]
    return Result(
        arch=arch,
        kernel=variant.kernel.fn.__name__,
        label=variant.label,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared,
        has_wgmma=has_wgmma,
        seconds=round(seconds, 2),
        problem=", ".join(problems),
    )


def nvidia_usage(log: str) -> tuple[int, int]:
    """Return (registers per thread, spilled bytes) from what `ptxas -v` prints."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise ValueError(f"ptxas did not report resources: {log[-500:]!r}")
    return max(map(int, registers)), sum(map(int, spills))


def amd_usage(assembly: str) -> tuple[int, int]:
    """Return (vector registers, scratch bytes) per lane from the metadata at the end of amdgcn assembly.

    Scratch is memory; scalar registers that spill into lanes of vector registers are none.
    """
    counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    if len(counts) != 2:
        raise ValueError("amdgcn metadata did not report resources")
    return int(counts["vgpr_count"]), int(counts["private_segment_fixed_size"])


def compile_error(arch: Arch) -> str:
    """Return why this Triton build cannot compile for `arch` at all, "" if it can; tried with the smallest kernel."""
    module = importlib.import_module("kvferry_kernels.silu_mul.triton")
    try:
        check(arch, module.__name__, 0)
    except Exception as error:  # noqa: BLE001  whatever a build without this backend raises is the answer
        return f"{type(error).__name__}: {error}"
    return ""


def source_hash() -> str:
    """Return a hash over what decides the results: the kernels, this gate, and the versions of torch and Triton."""
    digest = hashlib.sha256(f"{triton.__version__} {torch.__version__}".encode())
    for module in [*op_modules(), device_math, variants, random_numbers]:
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def run(archs: list[Arch], only: str, jobs: int) -> list[Result]:
    """Compile the variants whose "kernel label" contains `only` in `jobs` processes; compiler errors become problems."""
    tasks = [
        (arch, module.__name__, index, variant)
        for arch in archs
        for module in op_modules()
        for index, variant in enumerate(module.variants(arch))
        if only in f"{variant.kernel.fn.__name__} {variant.label}"
    ]
    results = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(check, *task[:3]) for task in tasks]
        for (arch, _, _, variant), future in zip(tasks, futures, strict=True):
            try:
                results.append(future.result())
            except Exception as error:  # noqa: BLE001  a compiler failure of any kind is a finding of the gate
                results.append(_failed(arch, variant, f"{type(error).__name__}: {error}"))
    return results


def _failed(arch: Arch, variant: Variant, problem: str) -> Result:
    return Result(
        arch=arch,
        kernel=variant.kernel.fn.__name__,
        label=variant.label,
        registers=0,
        spill_bytes=0,
        shared_bytes=0,
        has_wgmma=False,
        seconds=0.0,
        problem=problem,
    )


def table(results: list[Result]) -> str:
    """Return one line per result."""
    width = max(len(result.label) for result in results)
    lines = [
        f"{'target':8}{'kernel':20}{'variant':{width + 2}}{'registers':>9}{'spilled':>9}{'shared':>8}  wgmma  problem"
    ]
    for row in results:
        wgmma = "yes" if row.has_wgmma else ""
        numbers = f"{row.registers:>9}{row.spill_bytes:>9}{row.shared_bytes:>8}"
        lines.append(f"{row.arch:8}{row.kernel:20}{row.label:{width + 2}}{numbers}  {wgmma:7}{row.problem}".rstrip())
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the gate and return its exit status: 0 passed, 1 failed."""
    parser = argparse.ArgumentParser(
        prog="python -m kvferry_kernels.aot", description="Compile gate for Triton kernels."
    )
    parser.add_argument("--no-cache", action="store_true", help="compile even if results for this source are stored")
    parser.add_argument("--only", default="", help="compile variants whose kernel name and label contain this text")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compiler processes")
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    write = sys.stdout.write
    uncovered = uncovered_kernels()
    for name in uncovered:
        write(f"no variant compiles {name}\n")
    errors = {arch: compile_error(arch) for arch in Arch}
    for arch in (arch for arch, error in errors.items() if error):
        write(f"SKIP {arch}: this Triton build cannot compile for it: {errors[arch]}\n")
    archs = [arch for arch in Arch if not errors[arch]]
    store = Path(knobs.cache.dir) / f"kvferry-aot-{source_hash()}.json"
    began = time.perf_counter()
    if store.exists() and not options.no_cache and not options.only:
        results = [Result(**fields) for fields in loads(store.read_text())]
    else:
        results = run(archs, options.only, options.jobs)
        if not options.only:
            store.parent.mkdir(parents=True, exist_ok=True)
            store.write_text(dumps([asdict(result) for result in results]))
    failed = [result for result in results if result.problem]
    write(table(results) + "\n")
    write(f"{len(results)} variants, {len(failed)} failed, {time.perf_counter() - began:.0f} s\n")
    return 1 if failed or uncovered or not results else 0


if __name__ == "__main__":
    sys.exit(main())
