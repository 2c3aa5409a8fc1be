"""hvd.torch: `import horovod.torch` gives the same module, with the same submodules."""

import importlib
import pkgutil
import sys

import hvd.torch

for _module in pkgutil.iter_modules(hvd.torch.__path__):
    if not _module.name.startswith("_"):
        sys.modules[f"{__name__}.{_module.name}"] = importlib.import_module(f"hvd.torch.{_module.name}")
sys.modules[__name__] = hvd.torch
