"""One small call for each op the documents list, so that its dtypes can be observed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["SAMPLES", "Inputs"]


class Inputs:
    """Makes a call's inputs.

    Args:
        device_type: Where they lie.
        dtypes: What the floating point ones are, in turn.
    """

    def __init__(self, device_type: str, dtypes: Sequence[torch.dtype]) -> None:
        self.device_type = device_type
        self._dtypes = itertools.cycle(dtypes)

    def __call__(self, *shape: int) -> Tensor:
        """A floating point tensor with values in (0.25, 0.75), safe for every op here."""
        count = torch.Size(shape).numel()
        steps = torch.arange(0, count, device=self.device_type)
        values = steps / (2 * max(count - 1, 1)) + 0.25
        return values.reshape(shape).to(next(self._dtypes))

    def spd(self, n: int = 3) -> Tensor:
        """A symmetric positive definite matrix."""
        matrix = torch.eye(n, device=self.device_type) * 2 + 0.25
        return matrix.to(next(self._dtypes))

    def ints(self, *shape: int, high: int = 1) -> Tensor:
        """A tensor of integers below ``high``."""
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=self.device_type) % high).reshape(shape)


_Call = Callable[[Inputs], Any]


def _rnn_cell(op: Callable[..., Any], chunks: int, states: int) -> _Call:
    def call(t: Inputs) -> Any:
        hidden = t(2, 3) if states == 1 else (t(2, 3), t(2, 3))
        weights = (t(3 * chunks, 3), t(3 * chunks, 3), t(3 * chunks), t(3 * chunks))
        return op(t(2, 3), hidden, *weights)

    return call


def _pool_indices(dims: int) -> _Call:
    unpool = F.max_unpool2d if dims == 2 else F.max_unpool3d

    def call(t: Inputs) -> Any:
        return unpool(t(1, 1, *[2] * dims), t.ints(1, 1, *[2] * dims, high=2**dims), (2,) * dims)

    return call


def _lu(t: Inputs) -> tuple[Tensor, Tensor]:
    return t.spd(), torch.arange(1, 4, dtype=torch.int32, device=t.device_type)


# Names as the documents write them.
SAMPLES: Mapping[str, _Call] = {
    "GRUCell": _rnn_cell(torch.gru_cell, 3, 1),
    "LSTMCell": _rnn_cell(torch.lstm_cell, 4, 2),
    "RNNCell": _rnn_cell(torch.rnn_tanh_cell, 1, 1),
    "__matmul__": lambda t: t(3, 3) @ t(3, 3),
    "__pow__": lambda t: t(3) ** 1.5,
    "__rdiv__": lambda t: t(3).__rdiv__(2.0),
    "__rpow__": lambda t: 2.0 ** t(3),
    "__rtruediv__": lambda t: 2.0 / t(3),
    "_convolution": lambda t: torch._convolution(
        t(1, 1, 3, 3),
        t(1, 1, 2, 2),
        t(1),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        False,
        False,
        False,
        False,
    ),
    "_grid_sampler_2d_cpu_fallback": lambda t: torch._grid_sampler_2d_cpu_fallback(
        t(1, 1, 2, 2), t(1, 2, 2, 2), 0, 0, False
    ),
    "_lu_with_info": lambda t: torch._lu_with_info(t.spd()),
    "acos": lambda t: torch.acos(t(3)),
    "adaptive_avg_pool3d": lambda t: F.adaptive_avg_pool3d(t(1, 1, 2, 2, 2), 1),
    "adaptive_max_pool3d": lambda t: F.adaptive_max_pool3d(t(1, 1, 2, 2, 2), 1),
    "addbmm": lambda t: torch.addbmm(t(2, 2), t(2, 2, 2), t(2, 2, 2)),
    "addcdiv": lambda t: torch.addcdiv(t(3), t(3), t(3)),
    "addcmul": lambda t: torch.addcmul(t(3), t(3), t(3)),
    "addmm": lambda t: torch.addmm(t(2, 2), t(2, 2), t(2, 2)),
    "addmv": lambda t: torch.addmv(t(2), t(2, 2), t(2)),
    "addr": lambda t: torch.addr(t(2, 2), t(2), t(2)),
    "asin": lambda t: torch.asin(t(3)),
    "atan2": lambda t: torch.atan2(t(3), t(3)),
    "avg_pool3d": lambda t: F.avg_pool3d(t(1, 1, 2, 2, 2), 2),
    "baddbmm": lambda t: torch.baddbmm(t(2, 2, 2), t(2, 2, 2), t(2, 2, 2)),
    "bilinear": lambda t: F.bilinear(t(2, 3), t(2, 3), t(4, 3, 3)),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t(3), t(3)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(3), t(3)),
    "bmm": lambda t: torch.bmm(t(2, 2, 2), t(2, 2, 2)),
    "cat": lambda t: torch.cat([t(3), t(3)]),
    "cdist": lambda t: torch.cdist(t(3, 2), t(3, 2)),
    "chain_matmul": lambda t: torch.chain_matmul(t(2, 2), t(2, 2)),
    "cholesky": lambda t: torch.cholesky(t.spd()),
    "cholesky_inverse": lambda t: torch.cholesky_inverse(t.spd()),
    "cholesky_solve": lambda t: torch.cholesky_solve(t(3, 1), t.spd()),
    "conv1d": lambda t: F.conv1d(t(1, 1, 3), t(1, 1, 2)),
    "conv2d": lambda t: F.conv2d(t(1, 1, 3, 3), t(1, 1, 2, 2)),
    "conv3d": lambda t: F.conv3d(t(1, 1, 3, 3, 3), t(1, 1, 2, 2, 2)),
    "conv_tbc": lambda t: F.conv_tbc(t(3, 1, 2), t(1, 2, 2), t(2)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 1, 3), t(1, 1, 2)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 1, 3, 3), t(1, 1, 2, 2)),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t(1, 1, 3, 3, 3), t(1, 1, 2, 2, 2)),
    "cosh": lambda t: torch.cosh(t(3)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(2, 3), t(2, 3), t.ints(2) * 2 + 1),
    "cosine_similarity": lambda t: F.cosine_similarity(t(2, 3), t(2, 3)),
    "cross": lambda t: torch.cross(t(3), t(3), dim=0),
    "cross_entropy": lambda t: F.cross_entropy(t(2, 3), t.ints(2, high=3)),
    "ctc_loss": lambda t: torch.ctc_loss(t(4, 1, 3), t.ints(1, 2, high=2) + 1, (4,), (2,)),
    "cumprod": lambda t: torch.cumprod(t(3), 0),
    "cumsum": lambda t: torch.cumsum(t(3), 0),
    "diag": lambda t: torch.diag(t(3)),
    "diagflat": lambda t: torch.diagflat(t(3)),
    "dist": lambda t: torch.dist(t(3), t(3)),
    "dot": lambda t: torch.dot(t(3), t(3)),
    "equal": lambda t: torch.equal(t(3), t(3)),
    "erfinv": lambda t: torch.erfinv(t(3)),
    "exp": lambda t: torch.exp(t(3)),
    "expm1": lambda t: torch.expm1(t(3)),
    "fake_quantize_per_tensor_affine": lambda t: torch.fake_quantize_per_tensor_affine(
        t(3), 0.1, 0, 0, 255
    ),
    "fft_fft": lambda t: torch.fft.fft(t(4)),
    "fft_fft2": lambda t: torch.fft.fft2(t(4, 4)),
    "fft_fftn": lambda t: torch.fft.fftn(t(4, 4)),
    "fft_hfft": lambda t: torch.fft.hfft(t(4)),
    "fft_ifft": lambda t: torch.fft.ifft(t(4)),
    "fft_ifft2": lambda t: torch.fft.ifft2(t(4, 4)),
    "fft_ifftn": lambda t: torch.fft.ifftn(t(4, 4)),
    "fft_ihfft": lambda t: torch.fft.ihfft(t(4)),
    "fft_irfft": lambda t: torch.fft.irfft(t(4)),
    "fft_irfft2": lambda t: torch.fft.irfft2(t(4, 4)),
    "fft_irfftn": lambda t: torch.fft.irfftn(t(4, 4)),
    "fft_rfft": lambda t: torch.fft.rfft(t(4)),
    "fft_rfft2": lambda t: torch.fft.rfft2(t(4, 4)),
    "fft_rfftn": lambda t: torch.fft.rfftn(t(4, 4)),
    "fmod": lambda t: torch.fmod(t(3), t(3)),
    "fractional_max_pool2d": lambda t: torch._C._nn.fractional_max_pool2d(
        t(1, 1, 4, 4), [2, 2], [2, 2], t(1, 1, 2)
    ),
    "fractional_max_pool3d": lambda t: torch._C._nn.fractional_max_pool3d(
        t(1, 1, 4, 4, 4), [2, 2, 2], [2, 2, 2], t(1, 1, 3)
    ),
    "gelu": lambda t: F.gelu(t(3)),
    "geqrf": lambda t: torch.geqrf(t.spd()),
    "grid_sample": lambda t: F.grid_sample(t(1, 1, 2, 2), t(1, 2, 2, 2), align_corners=False),
    "grid_sampler": lambda t: torch.grid_sampler(t(1, 1, 2, 2), t(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_2d": lambda t: torch.grid_sampler_2d(t(1, 1, 2, 2), t(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_3d": lambda t: torch.grid_sampler_3d(
        t(1, 1, 2, 2, 2), t(1, 2, 2, 2, 3), 0, 0, False
    ),
    "group_norm": lambda t: F.group_norm(t(2, 4), 2),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(3), t.ints(3) * 2 + 1),
    "histc": lambda t: torch.histc(t(3), 2, 0, 1),
    "index_copy": lambda t: t(3).index_copy(0, t.ints(2, high=2), t(2)),
    "index_put": lambda t: t(3).index_put((t.ints(2, high=2),), t(2)),
    "inverse": lambda t: torch.inverse(t.spd()),
    "kl_div": lambda t: F.kl_div(t(2, 3), t(2, 3), reduction="sum"),
    "l1_loss": lambda t: F.l1_loss(t(3), t(3)),
    "layer_norm": lambda t: F.layer_norm(t(2, 3), (3,)),
    "linalg_cholesky": lambda t: torch.linalg.cholesky(t.spd()),
    "linalg_cholesky_ex": lambda t: torch.linalg.cholesky_ex(t.spd()),
    "linalg_cond": lambda t: torch.linalg.cond(t.spd()),
    "linalg_eig": lambda t: torch.linalg.eig(t.spd()),
    "linalg_eigh": lambda t: torch.linalg.eigh(t.spd()),
    "linalg_eigvals": lambda t: torch.linalg.eigvals(t.spd()),
    "linalg_eigvalsh": lambda t: torch.linalg.eigvalsh(t.spd()),
    "linalg_householder_product": lambda t: torch.linalg.householder_product(t(3, 2), t(2)),
    "linalg_inv": lambda t: torch.linalg.inv(t.spd()),
    "linalg_inv_ex": lambda t: torch.linalg.inv_ex(t.spd()),
    "linalg_lstsq": lambda t: torch.linalg.lstsq(t.spd(), t(3, 1)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t.spd()),
    "linalg_matrix_rank": lambda t: torch.linalg.matrix_rank(t.spd()),
    "linalg_qr": lambda t: torch.linalg.qr(t.spd()),
    "linalg_solve": lambda t: torch.linalg.solve(t.spd(), t(3, 1)),
    "linalg_svd": lambda t: torch.linalg.svd(t.spd()),
    "linalg_svdvals": lambda t: torch.linalg.svdvals(t.spd()),
    "linalg_tensorinv": lambda t: torch.linalg.tensorinv(t.spd(4).reshape(2, 2, 4), 2),
    "linalg_tensorsolve": lambda t: torch.linalg.tensorsolve(t.spd(4).reshape(2, 2, 4), t(2, 2)),
    "linear": lambda t: F.linear(t(2, 3), t(3, 3), t(3)),
    "log": lambda t: torch.log(t(3)),
    "log10": lambda t: torch.log10(t(3)),
    "log1p": lambda t: torch.log1p(t(3)),
    "log2": lambda t: torch.log2(t(3)),
    "log_softmax": lambda t: F.log_softmax(t(3), 0),
    "logcumsumexp": lambda t: torch.logcumsumexp(t(3), 0),
    "lu_solve": lambda t: torch.lu_solve(t(3, 1), *_lu(t)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(3), t(3), t(3)),
    "matmul": lambda t: torch.matmul(t(3, 3), t(3, 3)),
    "max_pool3d": lambda t: F.max_pool3d(t(1, 1, 2, 2, 2), 2),
    "max_unpool2d": _pool_indices(2),
    "max_unpool3d": _pool_indices(3),
    "mm": lambda t: torch.mm(t(3, 3), t(3, 3)),
    "mse_loss": lambda t: F.mse_loss(t(3), t(3)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(2, 2), t(2, 2)]),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(2, 3), t.ints(2, high=3)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(2, 3), t.ints(2, 3, high=3)),
    "multilabel_margin_loss_forward": lambda t: torch.ops.aten.multilabel_margin_loss_forward(
        t(2, 3), t.ints(2, 3, high=3), 1
    ),
    "mv": lambda t: torch.mv(t(3, 3), t(3)),
    "nanquantile": lambda t: torch.nanquantile(t(3), 0.5),
    "nll_loss": lambda t: F.nll_loss(t(2, 3), t.ints(2, high=3)),
    "norm": lambda t: torch.norm(t(3)),
    "normalize": lambda t: F.normalize(t(2, 3)),
    "orgqr": lambda t: torch.orgqr(t(3, 2), t(2)),
    "ormqr": lambda t: torch.ormqr(t(3, 2), t(2), t(3, 3)),
    "pdist": lambda t: F.pdist(t(3, 2)),
    "pinverse": lambda t: torch.pinverse(t.spd()),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(3), t(3)),
    "polar": lambda t: torch.polar(t(3), t(3)),
    "pow": lambda t: torch.pow(t(3), t(3)),
    "prelu": lambda t: F.prelu(t(2, 3), t(1)),
    "prod": lambda t: torch.prod(t(3)),
    "qr": lambda t: torch.qr(t.spd()),
    "quantile": lambda t: torch.quantile(t(3), 0.5),
    "reciprocal": lambda t: torch.reciprocal(t(3)),
    "reflection_pad1d": lambda t: F.pad(t(1, 1, 3), (1, 1), mode="reflect"),
    "reflection_pad2d": lambda t: F.pad(t(1, 1, 3, 3), (1, 1, 1, 1), mode="reflect"),
    "renorm": lambda t: torch.renorm(t(3, 3), 2, 0, 1.0),
    "replication_pad1d": lambda t: F.pad(t(1, 1, 3), (1, 1), mode="replicate"),
    "replication_pad2d": lambda t: F.pad(t(1, 1, 3, 3), (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d": lambda t: F.pad(t(1, 1, 2, 2, 2), (1,) * 6, mode="replicate"),
    "rsqrt": lambda t: torch.rsqrt(t(3)),
    "scatter_add": lambda t: t(3).scatter_add(0, t.ints(2, high=2), t(2)),
    "sinh": lambda t: torch.sinh(t(3)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(3), t(3)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(3), t(3)),
    "softmax": lambda t: F.softmax(t(3), 0),
    "softmin": lambda t: F.softmin(t(3), 0),
    "softplus": lambda t: F.softplus(t(3)),
    "stack": lambda t: torch.stack([t(3), t(3)]),
    "stft": lambda t: torch.stft(
        t(16), 4, window=torch.ones(4, device=t.device_type), return_complex=True
    ),
    "sum": lambda t: torch.sum(t(3)),
    "svd": lambda t: torch.svd(t.spd()),
    "tan": lambda t: torch.tan(t(3)),
    "tensordot": lambda t: torch.tensordot(t(2, 2), t(2, 2), dims=1),
    "trace": lambda t: torch.trace(t.spd()),
    "triangular_solve": lambda t: torch.triangular_solve(t(3, 1), t.spd()),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3)),
    "vander": lambda t: torch.vander(t(3)),
    "view_as_complex": lambda t: torch.view_as_complex(t(3, 2)),
    # Ops that torch registers and no document lists.
    "_addmm_activation": lambda t: torch._addmm_activation(t(2), t(2, 2), t(2, 2)),
    "_native_multi_head_attention": lambda t: torch._native_multi_head_attention(
        t(1, 2, 4), t(1, 2, 4), t(1, 2, 4), 4, 2, t(12, 4), t(12), t(4, 4), t(4)
    ),
    "convolution": lambda t: torch.convolution(
        t(1, 1, 3, 3), t(1, 1, 2, 2), t(1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "cross_entropy_loss": lambda t: torch._C._nn.cross_entropy_loss(t(2, 3), t.ints(2, high=3)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(2, 2), t(2, 2)),
    "frobenius_norm": lambda t: torch.frobenius_norm(t(2, 2), [0, 1]),
    "gru_cell": _rnn_cell(torch.gru_cell, 3, 1),
    "huber_loss": lambda t: F.huber_loss(t(3), t(3)),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t(2, 2), t(2, 2)]),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t(3), t(3)),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t(3)),
    "logsumexp": lambda t: torch.logsumexp(t(3), 0),
    "lstm_cell": _rnn_cell(torch.lstm_cell, 4, 2),
    "native_layer_norm": lambda t: torch.native_layer_norm(t(2, 3), [3], None, None, 1e-5),
    "nll_loss2d": lambda t: torch.ops.aten.nll_loss2d(t(1, 3, 2, 2), t.ints(1, 2, 2, high=3)),
    "nuclear_norm": lambda t: torch.nuclear_norm(t.spd()),
    "rms_norm": lambda t: F.rms_norm(t(2, 3), (3,)),
    "rnn_relu_cell": _rnn_cell(torch.rnn_relu_cell, 1, 1),
    "rnn_tanh_cell": _rnn_cell(torch.rnn_tanh_cell, 1, 1),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t(1, 1, 2, 4), t(1, 1, 2, 4), t(1, 1, 2, 4)
    ),
    "upsample_bicubic2d": lambda t: F.interpolate(t(1, 1, 2, 2), 4, mode="bicubic"),
    "_upsample_bicubic2d_aa": lambda t: F.interpolate(
        t(1, 1, 2, 2), 4, mode="bicubic", antialias=True
    ),
    "upsample_bilinear2d": lambda t: F.interpolate(t(1, 1, 2, 2), 4, mode="bilinear"),
    "_upsample_bilinear2d_aa": lambda t: F.interpolate(
        t(1, 1, 2, 2), 4, mode="bilinear", antialias=True
    ),
    "upsample_linear1d": lambda t: F.interpolate(t(1, 1, 2), 4, mode="linear"),
    "upsample_nearest1d": lambda t: F.interpolate(t(1, 1, 2), 4),
    "upsample_nearest2d": lambda t: F.interpolate(t(1, 1, 2, 2), 4),
    "upsample_nearest3d": lambda t: F.interpolate(t(1, 1, 2, 2, 2), 4),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t(1, 1, 2), 4, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t(1, 1, 2, 2), 4, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t(1, 1, 2, 2, 2), 4, mode="nearest-exact"),
    "upsample_trilinear3d": lambda t: F.interpolate(t(1, 1, 2, 2, 2), 4, mode="trilinear"),
    "vdot": lambda t: torch.vdot(t(3), t(3)),
}
