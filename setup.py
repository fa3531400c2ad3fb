"""The compiled kernels of sfumato.gradients and sfumato.audit, and the explanations of errors in the wheel.

The kernels are optional: without a C compiler the package is the same, somewhat slower. Everything else is in
pyproject.toml.
"""

from __future__ import annotations

from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

PLACE = "src/sfumato/gradients/kernels"
UNIX = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Wno-psabi"]
# Threads; else one thread with sums in vectors (Apple's compiler has no OpenMP); else plain C.
WAYS = (
    (["-fopenmp"], ["-fopenmp"]),
    (["-fopenmp-simd", "-DOPENMP_SIMD"], []),
    ([], []),
)
EXPORTS = (
    *("kernels_version", "kernels_lanes", "channel_sums", "group_norm_backward"),
    *("filter_moments", "unit_filters", "head_sums", "kernels_pairs", "weighted_sum", "low_weighted_sum"),
    *("low_group_norm_backward", "low_filters", "low_filter_sum"),
)
LENET = "sfumato.audit._lenet"
LENET_EXPORTS = ("lenet_version", "lenet_lanes", "lenet_forward", "lenet_backward")


class BuildKernels(build_ext):
    """Takes the first of WAYS that the compiler knows; if none works the package is built without kernels."""

    def build_extension(self, extension: Extension) -> None:
        if self.compiler.compiler_type == "msvc":
            extension.extra_compile_args = ["/O2", "/std:c11"]
            return super().build_extension(extension)
        for number, (compile_args, link_args) in enumerate(WAYS, start=1):
            extension.extra_compile_args, extension.extra_link_args = UNIX + compile_args, [*link_args, "-lm"]
            try:
                return super().build_extension(extension)
            except (CompileError, LinkError):
                if number == len(WAYS):
                    raise
        return None

    def get_export_symbols(self, extension: Extension) -> list[str]:
        """Windows exports what is named: a library of C functions, not a Python module with its PyInit."""
        return list(LENET_EXPORTS if extension.name == LENET else EXPORTS)


class BuildPackage(build_py):
    """docs/errors.md goes into the wheel, for `sfumato errors show`; the repository has no second copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a clone has the document itself
            self.copy_file("docs/errors.md", str(Path(self.build_lib, "sfumato", "errors.md")))


setup(
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    ext_modules=[
        Extension(
            "sfumato.gradients.kernels._fused",
            sources=sorted(glob(f"{PLACE}/*.c")),
            depends=sorted(glob(f"{PLACE}/*.h")),
            optional=True,
        ),
        # vectors wider than the oldest processor's are passed between functions that are always inlined
        Extension(
            LENET,
            sources=["src/sfumato/audit/lenet.c"],
            depends=sorted(glob(f"{PLACE}/*.h")),
            optional=True,
        ),
    ],
)
