"""malloc: a rank that frees and allocates again gets no new pages from the kernel."""

import os
import resource

import psutil
import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.malloc import keep_freed_memory
from lockstep.model.gradient_hashes import hashing_gradients

BLOCK = 40 << 20  # above 32 MiB glibc by default maps new pages each time
TIMES = 10


def pages_handed_out(environ):
    """Return how many pages the kernel handed out while two blocks were freed again and again."""
    os.environ.update(environ)
    ls.init()
    for number in range(2 * TIMES):
        if number == TIMES:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # Two at a time, as a network's activations: the end of the heap grows and shrinks.
        first, second = (torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(2))
        del first, second
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    ls.shutdown()
    return pages


def bytes_kept(is_sharded):
    """Return the bytes that stay in the process after large blocks between small ones are freed."""
    ls.init()
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        ls.exact(fully_shard(nn.Linear(4, 4)), microbatches=1)
    before = psutil.Process().memory_info().rss
    blocks = [(torch.ones(BLOCK // 4, dtype=torch.uint8), torch.ones(5000)) for _ in range(TIMES)]
    small = [small for _, small in blocks]
    del blocks
    kept = psutil.Process().memory_info().rss - before
    ls.shutdown()
    return kept, len(small)


def has_glibc():
    try:
        return "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, AttributeError):
        return False


@pytest.mark.skipif(not has_glibc(), reason="only glibc has this setting")
def test_freed_memory_is_kept():
    (kept,) = ls.launch(pages_handed_out, ({},), nprocs=1)
    (returned,) = ls.launch(pages_handed_out, ({"MALLOC_ARENA_MAX": "8"},), nprocs=1)
    assert returned > TIMES * BLOCK / resource.getpagesize()  # otherwise this test shows nothing
    assert kept < returned / 4


def test_settings_of_the_user_take_precedence():
    def asked():
        os.environ["MALLOC_ARENA_MAX"] = "2"
        return keep_freed_memory()

    assert ls.launch(asked, nprocs=1) == [False]


@pytest.mark.skipif(not has_glibc(), reason="only glibc has this setting")
def test_freed_memory_is_returned_if_parameters_are_sharded():
    ((kept, _),) = ls.launch(bytes_kept, (False,), nprocs=1)
    ((returned, _),) = ls.launch(bytes_kept, (True,), nprocs=1)
    assert kept > TIMES * BLOCK / 4  # otherwise this test shows nothing
    assert returned < kept / 4


def bytes_kept_by_a_repetition(frees):
    """Return the bytes that stay after a backward pass whose gradients are freed one by one."""
    ls.init()
    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU()))
    model = nn.Sequential(*layers)
    inputs = torch.randn(32, 2048)
    model(inputs).sum().backward()  # the gradients of a step, which stay
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    before = psutil.Process().memory_info().rss
    loss = model(inputs).sum()
    with hashing_gradients(model.named_parameters() if frees else (), [loss], [model]):
        loss.backward()
    model.zero_grad()
    kept = psutil.Process().memory_info().rss - before
    # Afterwards a step finds its memory again: not always at once, since a small tensor may take
    # a part of the block that was freed, but blocks that are returned cost all pages each time.
    faults = [pages_of_a_block() for _ in range(TIMES)]
    ls.shutdown()
    return kept, min(faults), len(gradients)


def pages_of_a_block():
    """Return how many pages the kernel hands out for a block that is allocated and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(BLOCK, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not has_glibc(), reason="only glibc has this setting")
def test_a_repetition_keeps_no_memory():
    """Its gradients left holes between small tensors, into which later ones did not fit."""
    ((kept, _, _),) = ls.launch(bytes_kept_by_a_repetition, (False,), nprocs=1)
    ((left, faults, _),) = ls.launch(bytes_kept_by_a_repetition, (True,), nprocs=1)
    assert kept > 80 << 20  # otherwise this test shows nothing
    assert left < kept / 8
    assert faults < BLOCK / resource.getpagesize() / 4
