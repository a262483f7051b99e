"""Table of op families: dispatcher ops that do one computation under several names.

To add an op, write its dispatcher name into the family of the ops that do the same computation.
"""

from __future__ import annotations

__all__ = ["ALIASES", "FAMILIES"]

# A family begins in the first column. torch may run a linear layer as linear, addmm or mm, and its
# caller cannot choose, so a list that moved one of the names would leave some calls in their old
# precision.
_FAMILIES = """
mm matmul linear addmm _addmm_activation bmm baddbmm addbmm mv addmv addr dot vdot inner
    chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot einsum tensordot bilinear
    _trilinear ger outer mkldnn_linear
conv1d conv2d conv3d convolution _convolution _convolution_mode convolution_overrideable
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution
    cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
    mkldnn_convolution miopen_convolution miopen_convolution_transpose
    miopen_depthwise_convolution slow_conv3d thnn_conv2d slow_conv_transpose2d
    slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _slow_conv2d_forward
    _conv_depthwise2d conv_depthwise3d mps_convolution
scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _native_multi_head_attention
    _triton_multi_head_attention
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
    _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _lstm_mps
softmax _softmax special_softmax _safe_softmax
log_softmax _log_softmax special_log_softmax
logsumexp special_logsumexp
layer_norm native_layer_norm
rms_norm _fused_rms_norm
group_norm native_group_norm
batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _batch_norm_impl_index _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm
    miopen_batch_norm
norm linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm
pow float_power
cross_entropy_loss nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward
cdist _cdist_forward _euclidean_dist
pdist _pdist_forward
ctc_loss _ctc_loss
prelu _prelu_kernel
multilabel_margin_loss multilabel_margin_loss_forward
grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler
max_pool1d max_pool1d_with_indices
max_pool2d max_pool2d_with_indices mkldnn_max_pool2d
max_pool3d max_pool3d_with_indices mkldnn_max_pool3d
cat concat concatenate
inverse linalg_inv linalg_inv_ex
expm1 special_expm1
log1p special_log1p
erfinv special_erfinv
sigmoid special_expit
logit special_logit
sum nansum
"""

# A public function, method or module without an op of its name, and the ops that it calls.
_ALIASES = """
GRUCell: gru_cell
LSTMCell: lstm_cell
RNNCell: rnn_tanh_cell rnn_relu_cell
__matmul__: matmul
__rmatmul__: matmul
__pow__: pow
__rpow__: pow
__rdiv__: reciprocal
__rtruediv__: reciprocal
attention: scaled_dot_product_attention
cross_entropy: cross_entropy_loss
grid_sample: grid_sampler
interpolate: upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa upsample_trilinear3d
multi_dot: linalg_multi_dot
nll_loss: nll_loss nll_loss2d
norm: norm linalg_vector_norm frobenius_norm nuclear_norm
normalize: linalg_vector_norm norm
softmin: softmax
"""


def _parse_entries(table: str) -> list[str]:
    """Return the entries of a table, in which the lines after the first one are indented."""
    joined = table.replace("\n ", " ")
    return joined.strip().splitlines()


FAMILIES = tuple(frozenset(entry.split()) for entry in _parse_entries(_FAMILIES))
ALIASES: dict[str, tuple[str, ...]] = {}
for _entry in _parse_entries(_ALIASES):
    _name, _ops = _entry.split(":")
    ALIASES[_name] = tuple(_ops.split())
