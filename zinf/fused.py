"""A causal language model's own head and loss, computed as one, so that the logits of a batch never exist.

transformers' models compute `logits = self.lm_head(hidden)`, perhaps scale or cap them, and call `self.loss_function(logits, labels,
...)`. While a forward has labels, and its logits would be large, the head answers with a `Logits`: a tensor that has shape and dtype and
no values, and that notes what is done to it element by element. The loss function then finds hidden states and notes in it, and computes
the loss by tiles, inside the head's own (streamed) forward: see heads.py. So no architecture is named here.

[Note: whoever reads logits gets them] Any other use of a `Logits` (an index, a view, a mean; outputs.logits after the forward, until the
next step) computes the real ones first, by the head's forward, and goes on with them: a model or a metric that zinf does not know is
slower, never wrong.

Nothing is patched but this model's instances, and `undo` takes that back.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zinf.errors import ConfigError, EngineError
from zinf.heads import linear_cross_entropy

log = logging.getLogger("zinf")

AUTO_BYTES = 256 << 20  # logits of a batch in fp32 from which on `auto` does without them; plain PyTorch holds about four times as much

# Done to logits element by element, with numbers: noted for later.
_NOTED = frozenset("__truediv__ div true_divide divide __mul__ __rmul__ mul multiply tanh float to".split())
# Told without values.
_TOLD = frozenset(
    [f"{a}.__get__" for a in "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_nested is_quantized".split()]
    + "size dim numel nelement ndimension __len__ is_floating_point is_complex element_size __hash__".split()
)


class Logits(Tensor):
    """Logits (..., V) that have not been computed. See [Note: whoever reads logits gets them]."""

    hidden: Tensor
    notes: tuple[Callable[[Tensor], Tensor], ...]
    computed: Tensor | None
    _head: FusedHead
    _steps: int

    @staticmethod
    def of(head: FusedHead, hidden: Tensor, notes: tuple[Callable[[Tensor], Tensor], ...], dtype: torch.dtype) -> Logits:
        shape = (*hidden.shape[:-1], head.head.out_features)
        self: Logits = torch.Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=hidden.device)  # type: ignore[attr-defined]
        self.hidden, self.notes, self.computed = hidden, notes, None
        self._head, self._steps = head, head.steps()
        return self

    def compute(self) -> Tensor:
        """The real logits.

        Raises:
            EngineError: the weights have been stepped since.
        """
        if self.computed is None:
            if self._head.steps() != self._steps:
                raise EngineError("these logits were never computed (fused_head), and the weights have been stepped since: read outputs.logits before step()")
            self._head.note_full()
            self.computed = _replay(self.notes, self._head.streamed(self.hidden))
        return self.computed

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}.{name}"  # type: ignore[attr-defined]
        me = args[0] if args and isinstance(args[0], Logits) else None
        if name in _TOLD and me is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if me is not None and me.computed is None:
            if name == "__repr__":
                return f"Logits of shape {tuple(me.shape)}, {me.dtype}, not computed"
            if name in _NOTED and not kwargs and all(isinstance(a, (int, float, torch.dtype)) for a in args[1:]):
                dtype = func(torch.empty(0, dtype=me.dtype, device="meta"), *args[1:]).dtype
                return Logits.of(me._head, me.hidden, (*me.notes, lambda x: func(x, *args[1:])), dtype)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        """What wants values gets the real ones."""
        args, kwargs = tree_map(lambda a: a.compute() if isinstance(a, Logits) else a, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _replay(notes: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for note in notes:
        x = note(x)
    return x


@dataclasses.dataclass(eq=False)
class FusedHead:
    """The head and the loss of one model, while an engine has it."""

    model: nn.Module  # whose forward calls head, then loss_function
    head: nn.Linear
    mode: str  # auto, require, liger
    steps: Callable[[], int]  # that the weights have had
    own_loss: Callable[..., Tensor]
    streamed: Callable[..., Tensor]  # the head's forward with its weights brought to it
    labels: bool = False  # the forward that runs was given some
    used: int = 0  # losses computed
    full: int = 0  # logits computed after all

    # -- what is put into the model -----------------------------------------------------------------------------------------

    def install_below(self) -> Callable[[], None]:
        """Before the head is streamed: its forward, which also takes a loss to compute from its weights. Returns what undoes it."""
        head = self.head

        def forward(hidden: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
            return nn.Linear.forward(head, hidden) if loss is None else loss(hidden, head.weight, head.bias)

        head.forward = forward  # type: ignore[method-assign, assignment]
        return lambda: head.__dict__.pop("forward", None) and None

    def install_above(self) -> Callable[[], None]:
        """After the head is streamed: let it answer with `Logits`, and the loss take them. Returns what undoes it."""
        head, model = self.head, self.model
        self.streamed = streamed = head.forward
        users = model.__dict__.get("_loss_function")

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args or kwargs or not self.labels or not self._large(hidden):
                return streamed(hidden, *args, **kwargs)
            return Logits.of(self, hidden, (), _out_dtype(hidden, head))

        head.forward = forward  # type: ignore[method-assign, assignment]
        model.loss_function = self.loss  # type: ignore[assignment]  # a property, kept as _loss_function
        pre = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        post = model.register_forward_hook(self._end, always_call=True)

        def undo() -> None:
            pre.remove()
            post.remove()
            del model.__dict__["_loss_function"]
            if users is not None:
                model.loss_function = users
            head.forward = streamed  # type: ignore[method-assign]

        return undo

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments.get("labels")
        self.labels = labels is not None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.labels = False

    def _large(self, hidden: Tensor) -> bool:
        return self.mode != "auto" or hidden.numel() // hidden.shape[-1] * self.head.out_features * 4 >= AUTO_BYTES

    # -- the loss -----------------------------------------------------------------------------------------------------------

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """transformers' ForCausalLMLoss, by tiles where the logits are not there yet."""
        lazy = logits if isinstance(logits, Logits) and logits.computed is None and vocab_size == logits.shape[-1] else None
        if lazy is None:
            if self.labels and self.mode == "require":
                raise EngineError(f"fused_head is require, but {type(self.model).__name__} uses its logits before the loss: set fused_head to auto or off")
            real = logits.compute() if isinstance(logits, Logits) else logits
            return self.own_loss(real, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(lazy.shape[:-1])
        compute = _liger if self.mode == "liger" else linear_cross_entropy
        if self.mode == "liger" and lazy.notes and not self.used:
            log.info("fused_head: %s scales or caps its logits, which is left to zinf's own tiles instead of liger-kernel", type(self.model).__name__)
        self.used += 1

        def by_tiles(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            transform = (lambda x: _replay(lazy.notes, x)) if lazy.notes else None
            return compute(hidden, weight, targets.to(hidden.device), bias, ignore_index=ignore_index, transform=transform, num_items=num_items_in_batch)

        return self.streamed(lazy.hidden, loss=by_tiles)

    def report(self) -> dict[str, Any]:
        """How often it was used, and how often logits were computed after all."""
        return {"mode": self.mode, "model": type(self.model).__name__, "losses": self.used, "full_logits": self.full}

    def note_full(self) -> None:
        """The logits of a batch are about to be computed after all: say so, once."""
        if not self.full:
            log.info("fused_head: the full logits of a batch are computed, as %s or its caller uses them beside the loss", type(self.model).__name__)
        self.full += 1


def _out_dtype(hidden: Tensor, head: nn.Linear) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype


def find(model: nn.Module, mode: str, device: str, steps: Callable[[], int]) -> FusedHead | None:
    """The head of a causal language model whose logits need not exist; None where there is none or `mode` is "off".

    Raises:
        ConfigError: `mode` is "require" or "liger", and it cannot be done; says why.
    """
    if mode == "off":
        return None
    causal = [m for m in model.modules() if _is_causal(m) and _output_layer(m) is not None]
    why = _why_not(causal)
    if mode == "liger" and why is None:
        why = _why_no_liger(device)
    if why is not None:
        if mode != "auto":
            raise ConfigError(f"fused_head is {mode}, but {why}: set fused_head to auto or off")
        if causal:
            log.info("fused_head: not used, as %s", why)
        return None
    lm = causal[0]
    head = _output_layer(lm)
    assert isinstance(head, nn.Linear)
    return FusedHead(lm, head, mode, steps, lm.loss_function, head.forward)  # type: ignore[arg-type]


def _is_causal(module: nn.Module) -> bool:
    """By transformers' own name of its loss; some older models have none, and get that of causal models."""
    name = vars(module).get("loss_type", "")  # its own: wrappers such as PEFT's pass on what they wrap
    return name in ("ForCausalLM", "ForConditionalGeneration") or (name is None and type(module).__name__.endswith("LMHeadModel"))


def _output_layer(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    return get() if callable(get) else None


def _why_not(causal: list[nn.Module]) -> str | None:
    if len(causal) != 1:
        return f"the model has {len(causal) or 'no'} causal language models of transformers in it"
    head, name = _output_layer(causal[0]), type(causal[0]).__name__
    if type(head) is not nn.Linear:
        return f"the head of {name} is a {type(head).__name__}, not a Linear"
    if "forward" in head.__dict__:
        return f"the head of {name} has a forward of its own"
    if getattr(causal[0].loss_function, "__name__", "") != "ForCausalLMLoss":
        return f"the loss of {name} is not ForCausalLMLoss"
    return None


# -- liger-kernel ---------------------------------------------------------------------------------------------------------------


def _why_no_liger(device: str) -> str | None:
    if device != "cuda":
        return f"its kernels run on cuda, and the device is {device}"
    try:
        importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as e:
        return f"liger-kernel cannot be imported ({e}): pip install liger-kernel"
    return None


def _liger(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    transform: Callable[[Tensor], Tensor] | None,
    num_items: Tensor | int | None,
) -> Tensor:
    """The same loss by liger-kernel. What it cannot do to logits is done by zinf's own."""
    if transform is not None:
        return linear_cross_entropy(hidden, weight, targets, bias, ignore_index=ignore_index, transform=transform, num_items=num_items)
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss = function(rows, weight, targets.reshape(-1), bias, ignore_index=ignore_index, reduction="mean" if num_items is None else "sum")
    return loss if num_items is None else loss / num_items
