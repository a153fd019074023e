"""Rule 3: which random numbers a model draws, and that no others are disturbed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.kernel.rng_scopes import RngScopes, find_scopes
from lockstep.kernel.seeds import key
from lockstep.model.blocks import find_block_names
from lockstep.model.native_seeder import make_rng_scopes

CPU = torch.device("cpu")


class Draws(nn.Module):
    """Returns what it draws, and keeps it."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, inputs):
        self.drawn.append(torch.rand(()).item())
        return (inputs * self.drawn[-1]).exp()


def drawn_with(*parts):
    generator = torch.Generator().manual_seed(key(*parts))
    return torch.rand((), generator=generator).item()


@pytest.fixture(params=[RngScopes, make_rng_scopes], ids=["plain", "native"])
def make_scopes(request):
    return request.param


def scopes_in(make_scopes, model):
    scopes = find_scopes(model, find_block_names(model, None))
    return make_scopes(scopes, model, seed=0, device=CPU)


def test_scopes_are_the_blocks_each_once_and_else_the_model():
    layers = [nn.Linear(1, 1), nn.ReLU()]
    shared = nn.Sequential(layers[0], layers[1], layers[0])
    assert find_scopes(shared, ["0", "1", "2"]) == layers
    alone = nn.Linear(1, 1)
    assert find_scopes(alone) == [alone]


def test_every_scope_draws_from_its_own_key(make_scopes):
    first = Draws()
    second = Draws()
    model = nn.Sequential(first, second)
    scopes = make_scopes([first, second], model, seed=3, device=CPU)
    with scopes.seed_calls():
        for step, m in [(0, 0), (0, 1), (7, 2)]:
            scopes.begin_microbatch(step, m)
            before = torch.rand(()).item()
            model(torch.zeros(2))
            after = torch.rand(()).item()
            assert before == drawn_with(3, step, m, -1)
            assert first.drawn[-1] == drawn_with(3, step, m, 0)
            assert second.drawn[-1] == drawn_with(3, step, m, 1)
            assert after == drawn_with(3, step, m, 2)
    assert len({*first.drawn, *second.drawn}) == 6


def test_a_scope_called_twice_draws_other_numbers(make_scopes):
    model = Draws()
    scopes = scopes_in(make_scopes, model)
    with scopes.seed_calls():
        scopes.begin_microbatch(4, 5)
        model(torch.zeros(1))
        model(torch.zeros(1))
    assert model.drawn == [drawn_with(0, 4, 5, 0), drawn_with(0, 4, 5, 0, 1)]


def test_recomputation_repeats_the_numbers_of_its_own_call(make_scopes):
    model = Draws()
    scopes = scopes_in(make_scopes, model)
    weight = torch.ones(1, requires_grad=True)
    with scopes.seed_calls():
        scopes.begin_microbatch(0, 0)
        # Three calls, each recomputed in backward, in whatever order autograd takes.
        outputs = [checkpoint(model, weight * (i + 1), use_reentrant=False) for i in range(3)]
        torch.stack(outputs).prod().backward()
    forward = model.drawn[:3]
    again = model.drawn[3:]
    assert len(set(forward)) == 3
    assert sorted(again) == sorted(forward)


def test_nothing_is_left_of_the_seeding(make_scopes):
    model = nn.Sequential(Draws())
    scopes = scopes_in(make_scopes, model)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with scopes.seed_calls():
        scopes.begin_microbatch(0, 0)
        model(torch.zeros(1))
    assert torch.equal(torch.rand(3), expected)
    assert not model._forward_hooks
    assert not model[0]._forward_pre_hooks


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.draws = Draws()

    def forward(self, inputs):
        return self.draws(inputs)


def test_hooks_of_the_user_draw_from_the_key_of_their_scope(make_scopes):
    model = Hooked()
    drawn = []
    model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
    model.register_forward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    scopes = make_scopes([model], model, seed=3, device=CPU)
    with scopes.seed_calls():
        scopes.begin_microbatch(4, 1)
        model(torch.zeros(2))
        after = torch.rand(()).item()
    generator = torch.Generator().manual_seed(key(3, 4, 1, 0))
    numbers = [torch.rand((), generator=generator).item() for _ in range(3)]
    assert [drawn[0], *model.draws.drawn, drawn[1]] == numbers
    assert after == drawn_with(3, 4, 1, 1)
