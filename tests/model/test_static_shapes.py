"""The graphs of steps depend only on shapes, not on what was compiled before or elsewhere."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn

from lockstep.comm import backend as native
from lockstep.kernel.errors import UsageError
from lockstep.model.static_shapes import StaticShapes


class Backend:
    """A compiler that notes which sizes of its graphs are symbolic."""

    def __init__(self):
        self.symbolic = []

    def __call__(self, graph, inputs):
        self.symbolic.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph


@pytest.fixture
def backend():
    torch.compiler.reset()
    yield Backend()
    torch.compiler.reset()


def double(values):
    return values * 2


def test_every_shape_has_a_graph_of_its_own(backend):
    function = torch.compile(double, backend=backend)
    for order in ((2, 3, 4), (4, 2, 3)):
        with StaticShapes(nn.Identity()):
            for size in order:
                function(torch.ones(size))
    assert backend.symbolic == [False] * 3


def test_graphs_from_outside_are_not_used(backend):
    """A rank that calls the model between steps would otherwise have other graphs than the rest."""
    function = torch.compile(double, backend=backend)
    for size in (2, 3):
        function(torch.ones(size))
    assert backend.symbolic == [False, True]
    with StaticShapes(nn.Identity()):
        for size in (2, 3, 4):
            function(torch.ones(size))
    assert backend.symbolic == [False, True] + 3 * [False]
    function(torch.ones(5))
    assert len(backend.symbolic) == 5


@pytest.mark.parametrize("reason", ["dynamic=True", "mark", "source"])
def test_a_symbolic_size_is_an_error_that_names_it(backend, reason):
    function = torch.compile(double, backend=backend, dynamic=reason == "dynamic=True" or None)
    values = torch.ones(3)
    if reason == "mark":
        torch._dynamo.mark_dynamic(values, 0)
    with (
        torch.compiler.config.patch(dynamic_sources="L['values']" if reason == "source" else ""),
        pytest.raises(UsageError, match=r"for several sizes of L\['values'\]\.size\(\)\[0\]"),
        StaticShapes(nn.Identity()),
    ):
        function(values)


def test_batch_norm_and_views_have_no_symbolic_size(backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    memory = torch.zeros(16)
    model[0].weight.grad = memory.view(4, 4)  # as gradients in a bucket
    with StaticShapes(model):
        torch.compile(model, backend=backend)(torch.ones(6, 4)[2:])


def test_an_error_of_the_body_is_not_replaced(backend):
    function = torch.compile(double, backend=backend, dynamic=True)

    def fail():
        raise ZeroDivisionError(function(torch.ones(3)))

    with pytest.raises(ZeroDivisionError), StaticShapes(nn.Identity()):
        fail()


@pytest.mark.parametrize("stance", ["eager_on_recompile", "eager_then_compile"])
def test_a_stance_that_depends_on_earlier_calls_is_an_error(stance):
    with (
        torch.compiler.set_stance(stance),
        pytest.raises(UsageError, match=f'"{stance}"'),
        StaticShapes(nn.Identity()),
    ):
        pass
    with torch.compiler.set_stance("force_eager"), StaticShapes(nn.Identity()):
        pass


@pytest.mark.parametrize("container", [False, True])
def test_each_compiled_module_may_have_as_many_shapes_as_torch_keeps_graphs(backend, container):
    """torch counts the graphs of all modules of a class together."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, values):
            return values[:, : len(self.weight)] * self.weight

    model = nn.Sequential(Block(7), Block(6), Block(5))
    if container:
        model.compile(backend=backend)
    else:
        for block in model:
            block.compile(backend=backend)
    with StaticShapes(model), torch.no_grad():
        for size in range(2, 9):
            model(torch.ones(size, 8))
    assert backend.symbolic == [False] * 21


def test_too_many_shapes_are_an_error_in_a_loop_of_the_user(backend):
    function = torch.compile(double, backend=backend)
    sizes = map(torch.ones, range(2, 20))
    with (
        pytest.raises(UsageError, match="more different shapes than torch"),
        StaticShapes(nn.Identity()),
    ):
        list(map(function, sizes))


def test_a_fall_back_to_eager_outside_of_steps_does_not_reach_them(backend):
    function = torch.compile(double, backend=backend, dynamic=False)
    for size in range(2, 12):
        function(torch.ones(size))
    assert len(backend.symbolic) == torch._dynamo.config.recompile_limit == 8
    function(torch.ones(12))
    assert len(backend.symbolic) == 8
    with StaticShapes(nn.Identity()):
        function(torch.ones(12))
    assert len(backend.symbolic) == 9


@pytest.mark.parametrize("is_late", [False, True])
def test_the_settings_hold_in_the_body_only(is_late):
    import torch._inductor.config as inductor

    torch.compiler.reset()
    config = torch._dynamo.config
    kind = torch.fx.experimental.symbolic_shapes.ShapeEnv
    create = kind.create_symbol
    compiled = []

    def compile_graph(graph, inputs):
        compiled.append(config.suppress_errors)
        assert config.fail_on_recompile_limit_hit
        assert inductor.deterministic
        assert not torch.is_autocast_cache_enabled()
        return graph

    function = None if is_late else torch.compile(double, backend=compile_graph)
    with config.patch(suppress_errors=True), inductor.patch(deterministic=False):
        with StaticShapes(nn.Identity()):
            for size in (2, 3):
                function = function or torch.compile(double, backend=compile_graph)
                function(torch.ones(size))
        assert compiled == [False, False]
        assert config.suppress_errors
        assert config.automatic_dynamic_shapes
        assert not config.fail_on_recompile_limit_hit
        assert not inductor.deterministic
        assert torch.is_autocast_cache_enabled()
        assert kind.create_symbol is create
    torch.compiler.reset()


def test_an_autocast_of_the_model_has_the_same_bits_before_the_compiler_is_imported(monkeypatch):
    """Whether it is imported in the first step depends on the launcher."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.config", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo.convert_frame", raising=False)
    with StaticShapes(nn.Identity()):
        assert not torch.autocast("cpu")._cache_enabled
    assert torch.autocast("cpu")._cache_enabled


def test_the_first_compilation_must_not_be_in_a_step(backend, monkeypatch):
    torch.compile(double, backend=backend)(torch.ones(2))
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    with (
        pytest.raises(UsageError, match="for the first time inside of a step"),
        StaticShapes(nn.Identity()),
    ):
        pass


@pytest.mark.parametrize("reset", [False, True])
def test_every_shape_has_a_graph_if_the_first_compilation_is_in_a_step(backend, reset):
    """After a reset of the compiler, nothing shows that a function was compiled before."""
    before = torch.compile(double, backend=backend)
    torch.compiler.reset()
    for order in ((2, 3, 4), (5,)):
        with StaticShapes(nn.Identity()):
            function = before if reset else torch.compile(double, backend=backend)
            for size in order:
                function(torch.ones(size))
    assert backend.symbolic == [False] * 4


def test_a_model_that_was_compiled_before_a_reset_has_a_graph_per_shape(backend):
    """The reset forgets the backends of torch.compile, but the model is compiled again."""
    model = torch.compile(nn.Linear(2, 2), backend=backend)
    torch.compiler.reset()
    with StaticShapes(model):
        for size in (2, 3, 4):
            model(torch.ones(size, 2))
    assert backend.symbolic == [False] * 3


@pytest.mark.skipif(not native.available(), reason="portable bits need the extension")
def test_the_code_of_inductor_uses_one_thread_for_portable_bits():
    """Otherwise it asks torch for their number, on which its sums depend."""
    from torch._inductor import config

    threads = []

    def compile_graph(graph, inputs):
        threads.append(config.cpp.threads)
        return graph

    function = torch.compile(double, backend=compile_graph)
    for is_portable in (True, False):
        torch.compiler.reset()
        with (
            mock.patch("lockstep.model.static_shapes.has_portable_bits", return_value=is_portable),
            StaticShapes(nn.Identity()),
        ):
            function(torch.ones(5))
    torch.compiler.reset()
    assert threads == [1, -1]
    assert config.cpp.threads == -1
