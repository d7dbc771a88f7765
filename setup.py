"""Compiles the kernels beside their sources; everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "engine" / "kernels"


class BuildWithKernels(build_py):
    """Without a compiler the package still installs: torch serves instead."""

    def run(self) -> None:
        spec = importlib.util.spec_from_file_location("kernel_build", KERNELS / "build.py")
        assert spec is not None
        assert spec.loader is not None
        kernel_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel_build)
        try:
            kernel_build.build_in_place()
        except kernel_build.BuildError as error:
            print(f"warning: kernels are not built: {error}", file=sys.stderr)
        super().run()


class BinaryDistribution(Distribution):
    """A wheel with the compiled kernels belongs to one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=BinaryDistribution)
