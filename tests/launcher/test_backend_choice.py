"""The backend that ranks use by default."""

from __future__ import annotations

import pytest

from lockstep.launcher.backend_choice import choose_backend

HERE = "here: it is not built"
NCCL = {"device_backend": "nccl"}


@pytest.mark.parametrize(("kind", "is_single_host", "options", "name", "reason"), [
    ("cuda", True, NCCL, "cpu:gloo,cuda:nccl", "because nccl is made for cuda"),
    ("cuda", False, {"unavailable": HERE, "requested": "gloo", **NCCL}, "cpu:gloo,cuda:nccl",
     "because nccl"),
    ("xpu", True, {"device_backend": "xccl"}, "cpu:gloo,xpu:xccl", "because xccl is made for xpu"),
    ("cuda", True, {"device_backend": "gloo"}, "cpu:gloo,cuda:gloo",
     "which is slower: it copies tensors to the CPU; this torch has no other backend for cuda"),
    ("cuda", True, {"is_shared": True, **NCCL}, "cpu:gloo,cuda:gloo",
     "because several ranks compute on one device, which nccl refuses"),
    ("cpu", True, {}, "lockstep", "because the ranks of a host share memory"),
    ("cpu", False, {}, "lockstep", "because the ranks of a host share memory, and no byte is sent"),
    ("cpu", True, {"unavailable": HERE}, "gloo",
     "which is many times slower than the backend 'lockstep'; that is not available " + HERE),
    ("cpu", False, {"unavailable": "on host b: why"}, "gloo",
     "which is slower than the backend 'lockstep'; that is not available on host b: why"),
    ("cpu", True, {"requested": "mpi", "unavailable": HERE}, "mpi",
     "because LOCKSTEP_BACKEND selects it"),
])  # fmt: skip
def test_the_choice_and_its_reason(kind, is_single_host, options, name, reason):
    given = {"unavailable": None, **options}
    choice = choose_backend(kind=kind, is_single_host=is_single_host, **given)
    assert choice.name == name
    assert choice.reason.startswith(reason)
    assert choice.is_slower == ("slower" in choice.reason)
