"""The loss of a language model from its last hidden states, without the logits of all tokens at once.

    x = hidden @ weight.T + bias         (tokens, V): at a vocabulary of 128k, 512 KiB a token in fp32, several times over
    y = softcap * tanh(x / softcap)      Gemma 2, arXiv:2408.00118, section 2
    nll = logsumexp(y) - y[label]        and with smoothing s (arXiv:1512.00567, section 7): (1 - s) nll + s mean(logsumexp(y) - y)
    loss = nll + z_loss * logsumexp(y)^2                          PaLM, arXiv:2204.02311, section 5
    d loss / d y = softmax(y) * (1 + 2 z_loss logsumexp(y)) - (1 - s) onehot(label) - s / V

Logits exist one tile at a time, at most TILE elements. Forward goes by tiles of whole rows. Each row's loss is computed by the
operations that plain PyTorch uses, and the rows are summed by the one that it uses, so the loss has the bits of
F.cross_entropy(F.linear(hidden, weight).float(), labels) as long as a matmul gives a row the same bits beside any others.

Gradients come in one of two ways; both leave only the rounding of sums over tiles apart from plain PyTorch's:

    with forward   as Liger does (arXiv:2410.10989): a tile's gradients follow its loss at once, so its logits are computed once.
                   Costs a sum of the weight's gradient in fp32 that lives until backward; with one tile there is no such sum, and the
                   gradients have the bits of plain PyTorch if the gradient of the loss is a power of two
    again          as Cut Cross-Entropy does (arXiv:2411.09009): backward computes the logits a second time, in tiles of `rows` by
                   some of the vocabulary, and the weight's gradient is written once. A third more arithmetic, and no memory

The first is taken where that sum is small (ONCE_BYTES) or the weight is frozen, but never for fp16: there the loss's gradient,
which holds the loss scale, must be in the product before it is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

TILE = 1 << 24  # elements of a tile of logits: 64 MiB in fp32, and about four times that while it is computed
ONCE_BYTES = 256 << 20  # the largest sum of a weight's gradient that is kept from forward to backward
ROWS_AGAIN = 4096  # rows of a tile in backward: what tiles add to (rows and columns of gradients) is least where they are square

Transform = Callable[[Tensor], Tensor]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    transform: Transform | None = None,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    chunk: int | None = None,
    once: bool | None = None,
) -> Tensor:
    """Cross-entropy of hidden @ weight.T + bias against labels, in memory that does not grow with tokens times vocabulary.

    Args:
        hidden: (..., H), any strides; weight: (V, H); bias: (V,); all of one floating dtype (autocast casts them, as for F.linear).
        labels: (...), int64. They are not shifted: hidden[i] predicts labels[i].
        ignore_index: the label of rows that do not count.
        label_smoothing, z_loss, softcap: see the module; None or 0 leaves them out.
        transform: what happens to the logits before softcap: differentiable, elementwise, called on tiles.
        reduction: "mean" over the rows that count (nan if there are none, as in torch), or "sum".
        num_items: divide the sum by this instead: the tokens of all batches of a step, as transformers' num_items_in_batch.
        chunk: rows in a tile; None takes as many as make TILE elements.
        once: compute gradients with forward (True) or again in backward (False); None chooses, see the module.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError, TypeError: shapes, dtypes, labels outside of [0, V), or options that make no sense.
    """
    _check(hidden, weight, labels, bias, ignore_index, reduction, chunk, label_smoothing)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not hidden.dtype == weight.dtype == (hidden if bias is None else bias).dtype:
        raise TypeError(f"hidden is {hidden.dtype}, weight {weight.dtype}, bias {bias.dtype if bias is not None else None}: give them one dtype")
    rows = hidden.reshape(-1, hidden.shape[-1])
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    if once is None:
        once = hidden.dtype is not torch.float16 and (frozen or 4 * weight.numel() <= ONCE_BYTES)
    head = _Head(
        ignore_index,
        label_smoothing,
        z_loss,
        _with_softcap(transform, softcap),
        "sum" if num_items is not None else reduction,
        num_items,
        chunk or _even(len(rows), max(1, TILE // weight.shape[0])),
        once,
        torch.is_grad_enabled(),
    )
    return _LinearCrossEntropy.apply(rows, weight, bias, labels.reshape(-1).to(hidden.device), head)


def count_targets(*labels: Tensor, ignore_index: int = -100, shift: bool = True) -> int:
    """The tokens that count in some batches: what all backwards of a step divide by, as num_items_in_batch.

    With `shift`, label i + 1 is predicted at position i, as in causal language models: the first label of a row never counts.
    """
    return int(sum(int((t[..., 1:] if shift else t).ne(ignore_index).sum()) for t in labels))


def _even(rows: int, most: int) -> int:
    """Rows of each tile: few tiles of up to `most`, all of about one size, as a small last one would cost as many sums as a large one."""
    return -(-rows // max(1, -(-rows // most))) or 1


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, reduction: str, chunk: int | None, smoothing: float) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: expected (..., H) and (V, H)")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} for hidden {tuple(hidden.shape)}: expected {tuple(hidden.shape[:-1])}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} for weight {tuple(weight.shape)}: expected {tuple(weight.shape[:1])}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}: expected int64")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: expected mean or sum")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: expected a positive number of rows")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {smoothing}: expected 0 to 1")
    wrong = labels[((labels < 0) | (labels >= weight.shape[0])) & (labels != ignore_index)]
    if wrong.numel():
        raise ValueError(f"label {int(wrong[0])} is outside of the vocabulary of {weight.shape[0]}; rows to leave out have label {ignore_index}")


def _with_softcap(transform: Transform | None, softcap: float | None) -> Transform | None:
    if not softcap:
        return transform

    def capped(x: Tensor) -> Tensor:
        x = transform(x) if transform is not None else x
        return softcap * torch.tanh(x.to(_wide(x.dtype)) / softcap)

    return capped


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What losses are computed and gradients are summed in."""
    return torch.promote_types(dtype, torch.float32)


@dataclasses.dataclass(frozen=True)
class _Head:
    """What a loss is made of, beside its tensors."""

    ignore_index: int
    smoothing: float
    z_loss: float
    transform: Transform | None
    reduction: str
    num_items: int | float | Tensor | None
    rows: int  # of a tile in forward
    once: bool  # gradients with forward
    grad: bool  # a backward may follow

    def logits(self, x: Tensor) -> Tensor:
        """What the loss is of, in fp32."""
        y = x if self.transform is None else self.transform(x)
        return y.to(_wide(y.dtype))

    def losses(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, logsumexp) of rows `y` (rows, V) with labels `target`, by the operations of plain PyTorch."""
        logp = torch.log_softmax(y, 1)
        nll = F.nll_loss(logp, target, reduction="none")
        loss, lse = nll, y.gather(1, target[:, None])[:, 0] + nll
        if self.smoothing:
            loss = (1 - self.smoothing) * nll - self.smoothing * logp.mean(1)
        if self.z_loss:
            loss = loss + self.z_loss * lse * lse
        return loss, lse.detach()

    def dlogits(self, p: Tensor, target: Tensor, scale: Tensor, lse: Tensor, vocab: int, first: int) -> Tensor:
        """The gradient of a tile of logits whose probabilities are `p`, in its memory. The tile's columns begin at token `first`."""
        p.mul_((scale * (1 + 2 * self.z_loss * lse) if self.z_loss else scale)[:, None])
        if self.smoothing:
            p.sub_((scale * (self.smoothing / vocab))[:, None])
        column = target - first
        here = (column >= 0) & (column < p.shape[1])
        return p.scatter_add_(1, column.where(here, 0)[:, None], (-(1 - self.smoothing) * scale).where(here, 0)[:, None])


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None, labels (N,)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            valid = labels != head.ignore_index
            target = labels.where(valid, 0).long()
            divisor = _divisor(head, valid, _wide(hidden.dtype))
            scale = (1 / divisor).expand(len(target)).where(valid, 0)  # gradient of the loss by each row's loss
            needs = [head.grad and n for n in ctx.needs_input_grad[:3]]
            grads = _Gradients(hidden, weight, bias, needs, head.rows) if head.once and any(needs) else None
            losses, lse = _forward(hidden, weight, bias, target, scale, head, grads)
            if any(needs):
                ctx.head, ctx.needs, ctx.dtype = head, needs, hidden.dtype
                # All that gradients are computed from; the weight detached, as it may be a view of memory that comes and goes.
                ctx.save_for_backward(*(grads.all() if grads is not None else (hidden, weight.detach(), bias, target, scale, lse)))
            total = F.nll_loss(-losses[:, None], torch.where(valid, 0, -100), reduction=head.reduction)  # adds rows as torch does
            return total / divisor if head.num_items is not None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.head.once:
                return *(_scaled(g, grad, ctx.dtype) for g in ctx.saved_tensors), None, None
            hidden, weight, bias, target, scale, lse = ctx.saved_tensors
            return *_again(hidden, weight, bias, target, scale * grad, lse, ctx.head, ctx.needs), None, None


def _divisor(head: _Head, valid: Tensor, dtype: torch.dtype) -> Tensor:
    if head.num_items is not None:
        return torch.as_tensor(head.num_items, dtype=dtype, device=valid.device).reshape(())
    return valid.sum().to(dtype) if head.reduction == "mean" else torch.ones((), dtype=dtype, device=valid.device)


class _Gradients:
    """Gradients that follow the loss of each tile of rows, for a loss whose own gradient is one."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], rows: int):
        self._one = len(hidden) <= rows  # tile: then sums are products, as plain PyTorch makes them
        dtype = hidden.dtype if self._one else _wide(hidden.dtype)
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None
        self.bias = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if needs[2] and bias is not None else None

    def add(self, dx: Tensor, rows: slice, hidden: Tensor, weight: Tensor) -> None:
        """`dx`: the gradient of a tile of logits, (rows, V)."""
        if self.hidden is not None:
            torch.mm(dx, weight, out=self.hidden[rows])
        if self.weight is not None:
            torch.mm(dx.t(), hidden, out=self.weight) if self._one else _add_product(self.weight, dx.t(), hidden)
        if self.bias is not None:
            self.bias.add_(dx.sum(0, dtype=self.bias.dtype))

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.bias


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. On the CPU the product is in total's dtype too; elsewhere it is rounded to that of `a` first, as fast units give it."""
    if total.dtype == a.dtype or a.device.type == "cpu":
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        total.add_(torch.mm(a, b))


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, head: _Head, grads: _Gradients | None
) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp) of each row, by tiles of rows; gradients too where `grads` is given."""
    losses = torch.zeros_like(scale)
    lse = torch.zeros_like(scale)
    for start in range(0, len(hidden), head.rows):
        rows = slice(start, start + head.rows)
        x = F.linear(hidden[rows], weight, bias).requires_grad_(grads is not None)
        with torch.set_grad_enabled(grads is not None):
            loss, lse[rows] = head.losses(head.logits(x), target[rows])
        losses[rows] = loss.detach().where(scale[rows] != 0, 0)  # (a row that does not count may hold anything)
        if grads is not None:
            (dx,) = torch.autograd.grad(loss, x, scale[rows])
            del x, loss
            grads.add(dx, rows, hidden[rows], weight)
    return losses, lse


def _scaled(g: Tensor | None, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """g * grad, rounded to `dtype` once."""
    return None if g is None else torch.mul(g, grad.to(g.dtype) if g.dtype is not dtype else grad, out=torch.empty_like(g, dtype=dtype))


def _again(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor, lse: Tensor, head: _Head, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients from logits that are computed a second time. Vocabulary outside, rows inside: the weight's gradient is written once."""
    (n, h), vocab, wide = hidden.shape, weight.shape[0], _wide(hidden.dtype)
    r = max(1, min(n, ROWS_AGAIN, head.rows * vocab))
    v = max(1, head.rows * vocab // r)
    d_hidden = torch.zeros(n, h, dtype=wide, device=hidden.device) if needs[0] else None
    d_weight = torch.empty_like(weight) if needs[1] else None
    d_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    for first in range(0, vocab, v):
        tokens = slice(first, first + v)
        w = weight[tokens]
        sum_w = torch.zeros(w.shape, dtype=hidden.dtype if n <= r else wide, device=w.device) if needs[1] else None
        sum_b = torch.zeros(len(w), dtype=wide, device=w.device)
        for start in range(0, n, r):
            rows = slice(start, start + r)
            x = F.linear(hidden[rows], w, None if bias is None else bias[tokens])
            with torch.set_grad_enabled(head.transform is not None):
                y = head.logits(x.requires_grad_(head.transform is not None))
            dx = head.dlogits((y.detach() - lse[rows, None]).exp_(), target[rows], scale[rows], lse[rows], vocab, first)
            dx = dx.to(x.dtype) if head.transform is None else torch.autograd.grad(y, x, dx)[0]
            del x, y
            if d_hidden is not None:
                _add_product(d_hidden[rows], dx, w)
            if sum_w is not None:
                _add_product(sum_w, dx.t(), hidden[rows])
            if d_bias is not None:
                sum_b += dx.sum(0, dtype=wide)
        if d_weight is not None and sum_w is not None:
            d_weight[tokens] = sum_w
        if d_bias is not None:
            d_bias[tokens] = sum_b
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias
