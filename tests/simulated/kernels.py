"""The kernels of the simulated accelerator: those of the CPU, on the same memory.

Every operator first lets the current stream catch up, and computes on the CPU into new memory.
The results are copied to their place by work of the stream, so another stream that does not wait
for this one finds memory without them. Views share the storage, as on any device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from simulated import streams

__all__ = ["TYPE", "as_cpu", "empty_strided", "map_file", "register", "stream_of"]

TYPE = "simulated"

CODES = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64),
    torch.bfloat16: (4, 16), torch.complex64: (5, 64), torch.complex128: (5, 128),
    torch.bool: (6, 8),
}  # fmt: skip
"""The numbers of dtypes in DLPack, and their bits."""

VIEWS = (
    "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Storage",
)  # fmt: skip
"""Operators of which the CPU's kernel works on any memory."""

SPARSE_PARTS = (
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_indices",
    "_values", "indices", "values", "sparse_dim", "dense_dim", "_nnz", "is_coalesced",
    "_coalesced_", "clone",
)  # fmt: skip
"""Operators of sparse tensors of which the CPU's kernel only handles their dense parts."""

LOWER_PRECISION = (
    "linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm",
    "scaled_dot_product_attention",
)  # fmt: skip
FULL_PRECISION = ("mse_loss", "cross_entropy_loss", "nll_loss", "l1_loss", "smooth_l1_loss")
"""Operators that autocast runs in the lower precision and in float32, as on a GPU."""

waits = 0
"""How often the host has waited for a device to read memory of it."""

_libraries: list[torch.library.Library] = []
_native: Any = None
_generators: Sequence[torch.Generator] = ()

# --- memory ----------------------------------------------------------------------------------


def empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None, device: Any
) -> torch.Tensor:
    """Return a tensor without defined values: all bits are 1."""
    dtype = dtype or torch.get_default_dtype()
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = 0 if 0 in size else last + 1
    index = torch.accelerator.current_device_index() if device is None else device.index
    if index is None:
        index = torch.accelerator.current_device_index()
    numbers = ctypes.c_int64 * len(size)
    made = _native.simulated_tensor(
        index, *CODES[dtype], len(size), numbers(*size), numbers(*stride), count * dtype.itemsize
    )
    return _adopt(made)


def map_file(descriptor: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the bytes of a file as memory of the device, which other processes may map too."""
    made = _native.simulated_mapped(device.index, descriptor, size)
    if made is None:
        raise RuntimeError(f"simulated: {size} bytes cannot be mapped")
    return _adopt(made)


def _adopt(made: int) -> torch.Tensor:
    capsule = ctypes.pythonapi.PyCapsule_New(ctypes.c_void_p(made), b"dltensor", None)
    return torch._C._from_dlpack(capsule)


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> torch.Tensor:
    meta = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return empty_strided(size, meta.stride(), dtype, device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return empty_strided(size, stride, dtype, device)


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU with the memory of one on the device, which must outlive it."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def stream_of(device: torch.device) -> streams.Stream:
    """Return the current stream of a device."""
    return streams.stream(device.index, torch.accelerator.current_stream(device).stream_id)


def _write(place: torch.Tensor, value: torch.Tensor) -> None:
    """Let the current stream write a value to memory of the device."""
    stream_of(place.device).launch(lambda: _copy_now(as_cpu(place), value))


def _copy_now(place: torch.Tensor, value: torch.Tensor) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        place.copy_(value)


# --- kernels ---------------------------------------------------------------------------------


def _copy_from(
    source: torch.Tensor, place: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if source.device.type == "cpu":
        is_late = non_blocking and source.is_pinned()
        _write(place, source.detach() if is_late else source.detach().clone())
        return place
    found = stream_of(source.device)
    if place.device == source.device:
        found.launch(lambda: _copy_now(as_cpu(place), as_cpu(source)))
        return place
    if place.device.type != "cpu":
        found.run()
        stream_of(place.device).run()
        _write(place, as_cpu(source).clone())
        return place
    found.launch(lambda: _copy_now(place.detach(), as_cpu(source)))
    if not non_blocking:
        _wait(found)
    return place


def _copy_from_and_resize(source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return _copy_from(source, place.resize_(source.size()))


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    _wait(stream_of(tensor.device))
    return as_cpu(tensor).item()


def _wait(stream: streams.Stream) -> None:
    global waits
    waits += 1
    stream.run()


def _resize(tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None) -> torch.Tensor:
    needed = (tensor.storage_offset() + math.prod(size)) * tensor.dtype.itemsize
    strides = torch.empty(
        size, device="meta", memory_format=memory_format or torch.contiguous_format
    ).stride()
    memory = tensor.untyped_storage()
    offset = tensor.storage_offset()
    if needed > memory.nbytes():
        memory = _empty([needed], torch.uint8, device=tensor.device).untyped_storage()
        kept = tensor.detach().clone() if tensor.numel() else None
        tensor.set_(memory, offset, size, strides)
        if kept is not None:
            tensor.view(-1)[: kept.numel()].copy_(kept.view(-1))
        return tensor
    return tensor.set_(memory, offset, size, strides)


def _convolve(*args: Any) -> Any:
    return _run_on_cpu(torch.ops.aten.convolution.default, *args)


def _convolve_backward(gradient: Any, values: Any, weight: Any, *args: Any) -> Any:
    bias_sizes = [gradient.shape[1]]
    op = torch.ops.aten.convolution_backward.default
    return _run_on_cpu(op, gradient, values, weight, bias_sizes, *args)


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other operator: compute on the CPU now, write the results later."""
    schema = op._schema
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    named |= kwargs
    tensors = [each for value in named.values() for each in _tensors(value)]
    device = _one_device(op, tensors, named)
    stream_of(device).run()
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    generator: torch.Generator | None = None
    converted: dict[str, Any] = {}
    for argument in schema.arguments:
        value = named.get(argument.name, argument.default_value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "device" and value is not None:
            value = torch.device("cpu")
        if str(argument.type) in ("Optional[Generator]", "Generator"):
            generator = value or _generators[device.index]
            value = torch.Generator()
            value.set_state(generator.get_state())
            drawn = value
        if argument.name in named or generator is not None:
            converted[argument.name] = _convert(value, is_written, written)
    results = op(**converted)
    if generator is not None:
        generator.set_state(drawn.get_state())
    for place, value in written:
        if place.is_sparse:
            _replace_parts(place, _return(value, {}, tensors, device))
            continue
        _write(place if place.size() == value.size() else _resize(place, value.size()), value)
    known = {id(value): place for place, value in written}
    return _return(results, known, tensors, device)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def _one_device(op: Any, tensors: Sequence[torch.Tensor], named: dict[str, Any]) -> torch.device:
    """Return the device of an operator's arguments; raise RuntimeError if there are several."""
    found = {each.device for each in tensors if each.device.type == TYPE}
    mixed = [each for each in tensors if each.device.type != TYPE and each.dim()]
    if len(found) > 1 or (mixed and not str(op).startswith("aten.index")):
        everything = sorted({str(each.device) for each in tensors})
        raise RuntimeError(f"{op}: expected all tensors to be on one device, found {everything}")
    if found:
        return found.pop()
    index = torch.device(named.get("device") or TYPE).index
    return torch.device(TYPE, torch.accelerator.current_device_index() if index is None else index)


def _convert(value: Any, is_written: bool, written: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, list | tuple):
        return [_convert(each, is_written, written) for each in value]
    if not isinstance(value, torch.Tensor) or value.device.type != TYPE:
        return value
    if value.is_sparse:
        memory = _sparse(as_cpu(value._indices()), as_cpu(value._values()), value)
    else:
        memory = as_cpu(value)
    if not is_written:
        return memory
    if value.is_sparse:
        copy = memory.clone()
    else:
        copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(memory)
    written.append((value, copy))
    return copy


def _share(name: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(key)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


_replace_parts = _share("copy_sparse_to_sparse_", torch._C.DispatchKey.SparseCPU)


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, like.size(), is_coalesced=like.is_coalesced(), check_invariants=False
    )


def _return(
    results: Any,
    known: dict[int, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    device: torch.device,
) -> Any:
    if isinstance(results, list | tuple):
        return type(results)(_return(each, known, tensors, device) for each in results)
    if not isinstance(results, torch.Tensor):
        return results
    if id(results) in known:
        return known[id(results)]
    if results.is_sparse:
        parts = results._indices(), results._values()
        return _sparse(*(_return(part, known, tensors, device) for part in parts), results)
    memory = results.untyped_storage().data_ptr()
    for each in tensors:
        if memory and not each.is_sparse and each.untyped_storage().data_ptr() == memory:  # a view
            place = results.size(), results.stride(), results.storage_offset()
            return torch.as_strided(each, *place)
    made = empty_strided(results.size(), results.stride(), results.dtype, device)
    _write(made, results)
    return made


# --- registration ----------------------------------------------------------------------------


def register(native: Any, generators: Sequence[torch.Generator]) -> None:
    """Let torch's dispatcher find the kernels."""
    global _native, _generators
    _native = native
    _generators = generators
    aten = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from_and_resize,
        "_local_scalar_dense": _local_scalar_dense,
        "resize_": _resize,
        "record_stream": lambda tensor, stream: None,  # memory is never used again before its end
        "convolution_overrideable": _convolve,
        "convolution_backward_overrideable": _convolve_backward,
    }.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in VIEWS:
        aten.impl(name, _share(name, torch._C.DispatchKey.CPU), "PrivateUse1")
    for name in SPARSE_PARTS:
        aten.impl(name, _share(name, torch._C.DispatchKey.SparseCPU), "SparsePrivateUse1")
    for name in (*LOWER_PRECISION, *FULL_PRECISION):
        aten.impl(name, _cast(name, is_lower=name in LOWER_PRECISION), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(_run_on_cpu, "PrivateUse1")
    others.fallback(_run_on_cpu, "SparsePrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend((aten, others))


def _cast(name: str, *, is_lower: bool) -> Callable[..., Any]:
    op = getattr(torch.ops.aten, name).default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(TYPE) if is_lower else torch.float32

        def convert(value: Any) -> Any:
            is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_cast and value.device.type == TYPE else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*map(convert, args), **{k: convert(v) for k, v in kwargs.items()})

    return call
