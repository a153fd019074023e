"""No operator of a training has other bits on another number of threads, in portable mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dev.thread_operators import ThreadComparison
from lockstep.comm import backend
from lockstep.portable.kernels import restore_kernels

TOOL = Path(__file__).resolve().parents[2] / "dev" / "thread_operators.py"

NAMES = (
    "layers add addcmul atan2 cosh exp2 lerp log1p logit mean nansum norm pow prod rsqrt sigmoid "
    "softmax log_softmax logsumexp std_mean sum tanh var histc masked_softmax "
    "nn_functional_binary_cross_entropy nn_functional_binary_cross_entropy_with_logits "
    "nn_functional_celu nn_functional_conv1d nn_functional_conv3d nn_functional_conv_transpose2d "
    "nn_functional_cross_entropy nn_functional_ctc_loss nn_functional_elu nn_functional_gelu "
    "nn_functional_glu nn_functional_group_norm nn_functional_huber_loss nn_functional_layer_norm "
    "nn_functional_logsigmoid nn_functional_mish nn_functional_mse_loss nn_functional_silu "
    "nn_functional_smooth_l1_loss nn_functional_soft_margin_loss nn_functional_softplus"
)


def test_operators_that_depend_on_threads_are_found():
    """Those of torch, without portable mode: the size exceeds the grain."""
    restore_kernels()
    threads = torch.get_num_threads()
    comparison = ThreadComparison((1, 2, 3, 5, 7))
    with comparison:
        for size in range(100_001, 100_017):  # the last elements of a thread have other bits
            torch.rand(size).sigmoid().add_(1).exp()
    torch.set_num_threads(threads)
    assert [*comparison.differing] == ["sigmoid.default"]
    assert {"add_.Tensor", "exp.default"} < comparison.compared


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not backend.available(), reason="it needs the extension")
def test_no_operator_of_a_training_depends_on_threads(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, str(TOOL), "--out", str(found), "--threads", "1", "3", "8"]
    environ = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([*command, "--names", *NAMES.split()], env=environ, check=True, timeout=1700)
    operators = json.loads(found.read_text())
    assert len(operators["compared"]) > 140  # as torch chooses kernels for the processor
    assert operators["differing"] == {}
