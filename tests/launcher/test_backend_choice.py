"""The backend that ranks use by default."""

from __future__ import annotations

import pytest

from lockstep.launcher.backend_choice import choose_backend

HERE = "here: it is not built"


@pytest.mark.parametrize(("is_gpu", "is_single_host", "options", "name", "reason"), [
    (True, True, {}, "cpu:gloo,cuda:nccl", "because nccl is made for GPUs"),
    (True, False, {"unavailable": HERE, "requested": "gloo"}, "cpu:gloo,cuda:nccl", "because nccl"),
    (False, True, {}, "lockstep", "because the ranks of a host share memory"),
    (False, False, {}, "lockstep", "because the ranks of a host share memory, and no byte is sent"),
    (False, True, {"unavailable": HERE}, "gloo",
     "which is many times slower than the backend 'lockstep'; that is not available " + HERE),
    (False, False, {"unavailable": "on host b: why"}, "gloo",
     "which is slower than the backend 'lockstep'; that is not available on host b: why"),
    (False, True, {"requested": "mpi4py", "unavailable": HERE}, "mpi4py",
     "because LOCKSTEP_BACKEND selects it"),
])  # fmt: skip
def test_the_choice_and_its_reason(is_gpu, is_single_host, options, name, reason):
    given = {"unavailable": None, **options}
    choice = choose_backend(is_gpu=is_gpu, is_single_host=is_single_host, **given)
    assert choice.name == name
    assert choice.reason.startswith(reason)
    assert choice.is_slower == ("slower" in choice.reason)
