"""Call sites: names of modules, parameters and buffers, and which code is the user's."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.model.call_site import CallSite, CallSites, is_code_of_user
from lockstep.tools.recipes import digits


class Probe(nn.Module):
    """Finds its own call site."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, finder: CallSites) -> CallSite:
        """Return where this line is."""
        return finder.find(sys._getframe())


def line_of_forward() -> str:
    """Return how the line of `Probe.forward` is named."""
    return f"test_call_site.py:{inspect.getsourcelines(Probe.forward)[1] + 2} in forward"


def test_names_of_units_parameters_and_buffers():
    probe = Probe()
    model = nn.Module()
    model.Probe = probe  # a name like that of a class
    loss = Probe()
    finder = CallSites({"": model, "Loss": loss})
    site = probe(finder)
    of_loss = loss(finder)
    assert (site.unit, of_loss.unit) == ("Probe", "Loss")
    assert site.source == of_loss.source == line_of_forward()
    names = [finder.name(each, site) for each in (probe.scale, probe.seen, loss.scale, loss.seen)]
    assert names == ["Probe.scale", "Probe.seen", "Loss.scale", ""]
    alone = CallSites({"": probe})
    site = probe(alone)
    assert (site.unit, alone.name(probe.seen, site), alone.name(probe.scale, site)) == (
        "Probe", "seen", "scale",
    )  # fmt: skip
    assert finder.find(sys._getframe()).unit == ""


def test_names_are_those_of_the_model_before_its_compilation():
    probe = Probe()
    for model in (
        torch.compile(nn.Sequential(probe), backend="eager"),
        nn.Sequential(torch.compile(probe, backend="eager")),
    ):
        finder = CallSites({"": model})
        site = probe(finder)
        assert (site.unit, finder.name(probe.scale, site)) == ("0", "0.scale")


@pytest.mark.parametrize(
    ("function", "is_user"),
    [
        (Probe.forward, True),
        (digits.digit_network, True),  # a recipe is the program of its run
        (pytest.raises, True),  # as a library of models would be
        (nn.Linear.forward, False),
        (lockstep.Trainer.step, False),
        (functools.wraps, False),
    ],
)
def test_code_of_the_user(function: Any, is_user: bool):
    assert is_code_of_user(function.__code__) == is_user
