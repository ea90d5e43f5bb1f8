"""GPU and CPU kernels, one sub-package each: ``megatron_rl.kernels.<name>``.

In a checkout the kernels lie in the top-level folder ``kernels/``, which has no ``__init__.py`` of
its own because ``kernels`` is also the import name of an unrelated package that transformers uses.
An installed package has them in this folder already, and then nothing is added.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if _checkout.is_dir() and not (_checkout / "__init__.py").exists():
    __path__.append(str(_checkout))
