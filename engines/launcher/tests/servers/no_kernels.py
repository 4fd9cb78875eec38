"""Replaces `sgl_kernel`, SGLang's GPU kernels: every name can be imported from it, and fails when it is called.

With `torch_native` attention and `pytorch` sampling nothing of it is called. The same holds for the PyTorch operators that it would
register; some modules look up their names when they are imported.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.4.10"


class Absent:
    """A name of the real module."""

    def __init__(self, name):
        self.__dict__["_name"] = self.__dict__["__name__"] = name

    def __getattr__(self, name):
        return absent(self._name, name)

    def __call__(self, *_, **__):
        raise NotImplementedError(f"there is no kernel {self._name} here")

    def __eq__(self, other):
        return isinstance(other, Absent) and other._name == self._name

    def __hash__(self):
        return hash(self._name)


def absent(parent, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{parent}.{name}")


class Part(types.ModuleType):
    def __getattr__(self, name):
        return absent(self.__name__, name)


class Operators(Part):
    """The operators for CPUs. Others do not exist: SGLang checks for them before it uses them."""

    def __getattr__(self, name):
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return super().__getattr__(name)


class Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below this one."""

    def find_spec(self, name, path, target=None):
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Part(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Parts())


def __getattr__(name):
    return absent(__name__, name)
torch.ops.sgl_kernel = Operators("torch.ops.sgl_kernel")
