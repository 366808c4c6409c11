"""Everything is in pyproject.toml; here only: the limiter's C library is built into the wheel.

Where no compiler is found the wheel is made without it and the limiter reports `not_built`. With
EDGEAGENT_LIMITER=prebuilt nothing is compiled: a library beside the sources is shipped, or none (that is
what install.sh wants). An editable install is left alone: `python -m edgeagent.isolation.limiter.build`
builds in place.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "edgeagent/isolation/limiter"


class BuildWithLimiter(build_py):
    def run(self):
        super().run()
        out = Path(self.build_lib) / PACKAGE
        if getattr(self, "editable_mode", False) or os.environ.get("EDGEAGENT_LIMITER") == "prebuilt":
            return  # what lies beside the sources has been copied with them
        for stale in out.glob("*.so"):  # from whatever sources, whenever
            stale.unlink()
        script = Path(__file__).parent / PACKAGE / "build.py"
        spec = importlib.util.spec_from_file_location("edgeagent_limiter_build", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        built, missing = module.build_all(out)
        for path in built.values():
            self.announce(f"built {path}", level=2)
        for sentence in missing:
            self.announce(f"limiter not built for {sentence}", level=3)


setup(cmdclass={"build_py": BuildWithLimiter})
