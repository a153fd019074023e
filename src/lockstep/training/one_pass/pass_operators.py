"""The operators that a pass over several micro-batches treats alike, by their names."""

from __future__ import annotations

__all__ = [
    "BATCH_NORMS",
    "CONVOLUTIONS",
    "DRAWS",
    "FACTORIES",
    "LOSSES",
    "OF_FLOAT32",
    "POSITION_FREE",
    "SELECTIONS",
    "SIZED_BY_VALUES",
    "UNSET",
    "VIEWS",
]

# The names are the words of texts: as lists of strings they would fill pages.
# ruff: noqa: SIM905

VIEWS = frozenset(
    # The last two are of gradients: copies among zeros.
    """
    alias as_strided chunk clone contiguous detach diagonal expand expand_as flatten movedim narrow
    permute reshape select slice split split_with_sizes squeeze swapaxes t transpose unbind
    unflatten unfold unsqueeze view view_as _reshape_alias _unsafe_view
    select_backward slice_backward
    """.split()
)
"""Operators that copy elements, so that those of a sum are the sum of those of its terms."""

SELECTIONS = frozenset(["as_strided", "narrow", "slice", "unfold"])
"""Views of some elements, whose number may be that of the samples."""

FACTORIES = frozenset(
    """
    cudnn_is_acceptable empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros
    ones_like zeros_like
    """.split()
)
"""Operators whose results do not depend on the elements of a tensor."""

UNSET = frozenset(
    """
    arange empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize
    resize_as
    """.split()
)
"""Operators that return memory as it is, or positions, which are not compared."""

SIZED_BY_VALUES = frozenset(
    """
    argwhere bincount masked_scatter masked_select nonzero nonzero_numpy nonzero_static
    unique_consecutive unique_dim unique_dim_consecutive _pack_padded_sequence _unique _unique2
    """.split()
)
"""Operators whose results have as many elements as the values of tensors say. That there are equal
numbers for all micro-batches in one step does not mean that there are in the next one."""

CONVOLUTIONS = frozenset(
    """
    _convolution conv1d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    """.split()
)
"""Convolutions that add up products in another order for a single sample."""

BATCH_NORMS = frozenset(["native_batch_norm", "native_batch_norm_backward"])
"""Batch norm, whose statistics are those of the rows of a micro-batch, and have a part for each."""

LOSSES = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss
    huber_loss_backward mse_loss mse_loss_backward nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
    soft_margin_loss_backward
    """.split()
)
"""Losses, which the native module computes for each micro-batch (`segmented_loss.h`)."""

COPIES = """
    broadcast_tensors cat concat constant_pad_nd copy flip gather index index_select pad
    pixel_shuffle pixel_unshuffle repeat repeat_interleave roll stack to tril triu type_as _to_copy
    embedding embedding_backward embedding_dense_backward value_selecting_reduction_backward
"""
"""Operators that copy elements or add them."""

ROUNDED_ONCE = """
    abs add amax amin argmax argmin clamp clamp_max clamp_min cumsum div eq ge gt hardtanh le
    l1_loss leaky_relu leaky_relu_backward logical_and logical_not logical_or lt masked_fill max
    maximum mean min minimum mse_loss mse_loss_backward mul ne neg relu rsub sqrt square sub sum
    threshold threshold_backward where
"""
"""Arithmetic that IEEE 754 defines."""

IN_ORDER = """
    _convolution addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d convolution convolution_backward einsum linear matmul mm
"""
"""Sums of products."""

BY_ROW = """
    topk _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_avg_pool2d avg_pool2d
    avg_pool2d_backward batch_norm max_pool2d max_pool2d_with_indices
    max_pool2d_with_indices_backward
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data log_softmax softmax
    _fused_rms_norm _fused_rms_norm_backward group_norm layer_norm native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward rms_norm
    cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward nll_loss_backward
    mkldnn_rnn_layer mkldnn_rnn_layer_backward
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward scaled_dot_product_attention _safe_softmax
"""
"""Operators that compute one row, or one plane of an image, after the other."""

DRAWS = frozenset(
    """
    bernoulli cauchy exponential geometric log_normal multinomial normal poisson random uniform
    """.split()
)
"""Operators that draw the numbers of one row after the other from a generator that they are given.
What else draws is found by the state of the default generator."""

POSITION_FREE = VIEWS.union(
    FACTORIES, *(names.split() for names in (COPIES, ROUNDED_ONCE, IN_ORDER, BY_ROW))
)
"""Operators whose result for an element does not depend on its position in the tensor."""

OF_FLOAT32 = frozenset(
    """
    erf exp gelu gelu_backward gru log rnn_relu rnn_tanh sigmoid sigmoid_backward silu silu_backward
    tanh tanh_backward
    """.split()
)
"""Those of which the same holds in float32 only, which Lockstep's own kernels compute."""
