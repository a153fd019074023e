"""Registration of the simulated accelerator, once per process and for its whole life.

    path = accelerator.build()          compiles device.cpp, if it has changed (seconds)
    accelerator.install(path, 2)        torch.accelerator has two devices of type "simulated"

A tensor on the device has memory of its own, which only the kernels in `kernels.py` read. Torch
refuses to mix it with tensors of the CPU. What the simulation cannot show: kernels that add in
another order, real concurrency, the memory of a device running out, and NCCL.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from simulated import kernels, streams

__all__ = ["build", "install"]

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(torch.__file__).parent

LONG = ctypes.c_int64
CALLBACKS = (
    (None, streams.record, (LONG, ctypes.c_int, LONG)),
    (None, streams.block, (LONG, ctypes.c_int, LONG)),
    (ctypes.c_int, streams.is_event_done, (LONG,)),
    (None, streams.synchronize_event, (LONG,)),
    (ctypes.c_int, streams.is_stream_done, (ctypes.c_int, LONG)),
    (None, lambda device, number: streams.stream(device, number).run(), (ctypes.c_int, LONG)),
    (None, streams.synchronize_device, (ctypes.c_int,)),
)
"""The functions in `Callbacks` of device.cpp: result, function, arguments."""

_kept: list[Any] = []  # what C++ refers to


def build(folder: Path) -> Path:
    """Compile device.cpp for this torch, unless `folder` has the result already."""
    text = SOURCE.read_bytes() + torch.__version__.encode()
    path = folder / f"simulated-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-g0", "-fPIC", "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-isystem", str(FOLDER / "include"),
            str(SOURCE), "-o", str(aside),
            f"-L{FOLDER / 'lib'}", "-lc10", "-ltorch_cpu",
        ],
        check=True,
    )  # fmt: skip
    aside.rename(path)
    return path


def install(path: Path, devices: int = 1) -> None:
    """Register the device type "simulated" with this number of devices."""
    native = ctypes.CDLL(str(path))
    functions = [
        ctypes.CFUNCTYPE(result, *arguments)(function) for result, function, arguments in CALLBACKS
    ]
    table = (ctypes.c_void_p * len(functions))(
        *(ctypes.cast(each, ctypes.c_void_p) for each in functions)
    )
    _kept.extend((native, functions, table))
    native.simulated_tensor.restype = ctypes.c_void_p
    native.simulated_tensor.argtypes = (
        *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    )  # fmt: skip
    native.simulated_mapped.restype = ctypes.c_void_p
    native.simulated_mapped.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
    ctypes.pythonapi.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    torch.utils.rename_privateuse1_backend(kernels.TYPE)
    native.simulated_register(devices, table)
    module = _device_module(devices)
    torch._register_device_module(kernels.TYPE, module)
    generate_methods_for_privateuse1_backend(for_storage=False)
    module.default_generators = tuple(
        torch.Generator(torch.device(kernels.TYPE, index)) for index in range(devices)
    )
    kernels.register(native, module.default_generators)


def _device_module(devices: int) -> Any:
    """Return `torch.simulated`, with the functions that `torch.cuda` has, too."""
    module: Any = types.ModuleType(f"torch.{kernels.TYPE}")

    def generator(device: Any) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        return module.default_generators[module.current_device() if index is None else index]

    def manual_seed_all(seed: int) -> None:
        for each in getattr(module, "default_generators", ()):
            each.manual_seed(seed)

    module.is_available = lambda: devices > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=kernels.TYPE: generator(device).get_state()
    module.set_rng_state = lambda state, device=kernels.TYPE: generator(device).set_state(state)
    module.manual_seed = lambda seed: generator(kernels.TYPE).manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    return module
