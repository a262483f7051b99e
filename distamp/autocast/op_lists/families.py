"""Families of ops: one computation under several names of the dispatcher."""

from __future__ import annotations

__all__ = ["FAMILIES", "RUNS_AS"]

# Ops that do one computation under several names: moving one of them alone would leave the others
# in the old precision, and callers cannot tell which of them torch picks (a linear layer may run
# as linear, addmm or mm).
FAMILIES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        """mm matmul linear addmm _addmm_activation bmm baddbmm addbmm mv addmv addr dot vdot
        inner chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot einsum tensordot
        bilinear _trilinear ger outer mkldnn_linear""",
        """conv1d conv2d conv3d convolution _convolution _convolution_mode convolution_overrideable
        conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
        mkldnn_convolution miopen_convolution miopen_convolution_transpose
        miopen_depthwise_convolution slow_conv3d thnn_conv2d slow_conv_transpose2d
        slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _slow_conv2d_forward
        _conv_depthwise2d conv_depthwise3d mps_convolution""",
        """scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _native_multi_head_attention
        _triton_multi_head_attention""",
        """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
        _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _lstm_mps""",
        "softmax _softmax special_softmax _safe_softmax",
        "log_softmax _log_softmax special_log_softmax",
        "logsumexp special_logsumexp",
        "layer_norm native_layer_norm",
        "rms_norm _fused_rms_norm",
        "group_norm native_group_norm",
        """batch_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _batch_norm_impl_index _batch_norm_with_update
        _batch_norm_no_update cudnn_batch_norm
        miopen_batch_norm""",
        "norm linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm",
        "pow float_power",
        "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward",
        "cdist _cdist_forward _euclidean_dist",
        "pdist _pdist_forward",
        "ctc_loss _ctc_loss",
        "prelu _prelu_kernel",
        "multilabel_margin_loss multilabel_margin_loss_forward",
        """grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
        cudnn_grid_sampler""",
        "max_pool1d max_pool1d_with_indices",
        "max_pool2d max_pool2d_with_indices mkldnn_max_pool2d",
        "max_pool3d max_pool3d_with_indices mkldnn_max_pool3d",
        "cat concat concatenate",
        "inverse linalg_inv linalg_inv_ex",
        "expm1 special_expm1",
        "log1p special_log1p",
        "erfinv special_erfinv",
        "sigmoid special_expit",
        "logit special_logit",
        "sum nansum",
    )
)

# What the other ops of a family come down to: a call of one of those is a call of some of these.
RUNS_AS: frozenset[str] = frozenset(
    """convolution _convolution convolution_overrideable mkldnn_convolution _conv_depthwise2d
    slow_conv3d thnn_conv2d slow_conv_dilated2d slow_conv_dilated3d _slow_conv2d_forward
    slow_conv_transpose2d slow_conv_transpose3d conv_depthwise3d
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention""".split()  # noqa: SIM905
)
