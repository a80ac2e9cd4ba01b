"""What can be computed: one file per family of ops. Importing this package registers them all."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys

from tilewright import devices as _devices
from tilewright import tensor as _tensor
from tilewright.tensor import Tensor

# Every public function of a family file is a name of this package: a new op needs one file and no other edit.
# SHARED lists a file's functions that other files use and that are no ops. Those whose first operand is the tensor
# they work on (named x, or a where there is a b) become methods of Tensor.
for _info in pkgutil.iter_modules(__path__):
    if not _info.name.startswith("_"):
        _module = importlib.import_module(f"{__name__}.{_info.name}")
        for _name, _value in vars(_module).items():
            if _name in getattr(_module, "SHARED", ()):
                continue
            if getattr(_value, "__module__", None) == _module.__name__ and callable(_value) and _name[0].islower():
                globals()[_name] = _value
                if not hasattr(Tensor, _name) and next(iter(inspect.signature(_value).parameters), "") in ("x", "a"):
                    setattr(Tensor, _name, _value)

_tensor._ops = sys.modules[__name__]
_devices.pick = importlib.import_module(f"{__name__}._default").pick
__all__ = ["Tensor"]
