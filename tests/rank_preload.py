"""Loaded once by the fork server, so that ranks start in a fraction of a second."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

from megatron_rl import cuda_on_cpu  # noqa: E402

cuda_on_cpu.enable()

import megatron.core.models.gpt  # noqa: E402, F401
import transformers  # noqa: E402, F401
