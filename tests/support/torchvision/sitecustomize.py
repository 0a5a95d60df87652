"""Let torchvision import beside a torch for the CPU: ``PYTHONPATH=tests/support/torchvision``.

The package registry's builds of torchvision are for CUDA, and beside another torch their compiled
operators are missing: "operator torchvision::nms does not exist". Processors use none of them, so
each is declared, without a kernel, before torchvision is imported. Python imports this file at its
start, so that it also reaches the `burnish` command.
"""

import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and then gets out of the
    way.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._declare(Path(spec.origin).with_name("_meta_registrations.py").read_text())
        return spec

    def _declare(self, registrations):
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in re.findall(r'@register_meta\("(\w+)"\)', registrations):
            self.library.define(f"{operator}(Tensor x) -> Tensor")
        for operator in re.findall(r'register_fake\("torchvision::(\w+)"\)', registrations):
            self.library.define(f"{operator}(Tensor x) -> Tensor")


DECLARE = DeclareOperators()  # it holds the library, which must stay alive
sys.meta_path.insert(0, DECLARE)
