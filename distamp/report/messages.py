"""The classes of messages between ranks, by the first match in a list of rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from distamp.report.collectives import CollectiveCall
from distamp.report.tensors import storage_key
from distamp.report.tracing import OpCall, OpContext

__all__ = [
    "RULES",
    "Message",
    "MessageClass",
    "RecordFunctionStack",
    "classify_message",
]

_GATHERING_KINDS = ("all_gather", "gather", "broadcast")
_FSDP_BLOCKS = ("FSDP::", "FullyShardedDataParallel._")
# Autograd nodes that pass a gradient on without computing a new one.
_PASSTHROUGH_NODES = re.compile(
    r"(ToCopy|View|UnsafeView|T|Transpose|Alias|Detach|\w*Redistribute|_ToTorchTensor"
    r"|_FromTorchTensor)Backward\d*"
)


class MessageClass(NamedTuple):
    """The class of a message.

    Attributes:
        key: The field of a contract; ``""`` if no field declares such messages.
        name: The module or parameter of the message; ``""`` if there are several.
        phase: As of `Observation`.
    """

    key: str
    name: str
    phase: str


class RecordFunctionStack:
    """The open blocks of ``torch.profiler.record_function``.

    FSDP, DDP and optimizers open such a block around their work.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def on_op(self, call: OpCall) -> None:
        """Open or close a block by an op of the profiler."""
        if "exit" not in call.op.name:
            self._names.append(str(call.args[0]))
        elif self._names:
            self._names.pop()

    @property
    def innermost(self) -> str:
        """The name of the innermost block; ``""`` if there is none."""
        return self._names[-1] if self._names else ""

    def is_inside(self, prefix: str | tuple[str, ...]) -> bool:
        """Return whether a block with such a name is open."""
        return any(name.startswith(prefix) for name in self._names)

    @property
    def is_inside_fsdp(self) -> bool:
        """True if FSDP runs and not a module of the user."""
        return self.is_inside(_FSDP_BLOCKS)


@dataclass
class Message:
    """A message that this rank sends, and its surroundings.

    Attributes:
        tensor: Its first tensor.
        collective: The collective.
        call: The op that sends it.
        blocks: The open blocks of the profiler.
        param_name: The parameter that the tensor holds or that it is a cast of; ``""`` if none.
        find_gradients: A function that returns the present gradients.
    """

    tensor: Tensor
    collective: CollectiveCall
    call: OpCall
    blocks: RecordFunctionStack
    param_name: str
    find_gradients: Callable[[], list[Tensor]]

    @property
    def context(self) -> OpContext:
        """The place in the step."""
        return self.call.context

    @property
    def key(self) -> str:
        """The field of a contract if the message is of parameters or gradients."""
        if self.collective.kind in _GATHERING_KINDS:
            return "param_all_gather"
        return "grad_reduce"


# The class of messages that no contract declares.
_UNDECLARED = MessageClass("", "", "")


def in_optimizer_step(message: Message) -> MessageClass | None:
    """Match parameters that a sharded optimizer broadcasts, and gradients that it reduces."""
    if message.blocks.is_inside("Optimizer.step"):
        return MessageClass(message.key, message.param_name, "optimizer")
    return None


def in_fsdp_block(message: Message) -> MessageClass | None:
    """Match messages of FSDP. FSDP2 writes the name of the module into the block."""
    block = message.blocks.innermost
    if not block.startswith(_FSDP_BLOCKS):
        return None
    name = message.context.module
    if block.startswith("FSDP::"):
        module = re.search(r"\((.*)\)", block)
        name = module[1] if module else ""
    return MessageClass(message.key, name, message.context.phase)


def point_to_point(message: Message) -> MessageClass | None:
    """Match activations and their gradients between pipeline stages."""
    if message.collective.kind == "send":
        return MessageClass("activations", message.context.module, message.context.phase)
    return None


def in_backward(message: Message) -> MessageClass | None:
    """Match gradients of parameters, or of activations, that a backward pass sends."""
    context = message.context
    if context.phase != "backward":
        return None
    leaf = _leaf_behind(context.node)
    param_name, _ = message.call.tracer.params.get(id(leaf), ("", ""))
    # An input of a reentrant checkpoint is a leaf too, and no parameter.
    if not param_name and context.node is not None:
        return MessageClass("activations", context.module, context.phase)
    if leaf is None or leaf.numel() != message.tensor.numel():
        # A bucket has the gradients of several parameters.
        param_name = ""
    return MessageClass("grad_reduce", param_name, context.phase)


def sends_parameter(message: Message) -> MessageClass | None:
    """Match parameters outside backward passes."""
    if message.param_name:
        return MessageClass("param_all_gather", message.param_name, message.context.phase)
    return None


def in_forward(message: Message) -> MessageClass | None:
    """Match activations that a module sends; broadcasts there are DDP's, of buffers."""
    is_in_model = message.call.tracer.frames or message.blocks.is_inside("DistributedDataParallel")
    if not is_in_model:
        return None
    if message.collective.kind == "broadcast":
        return _UNDECLARED
    return MessageClass("activations", message.context.module, message.context.phase)


def sends_gradients(message: Message) -> MessageClass | None:
    """Match gradients that the training loop sends after backward, by storage or by size."""
    gradients = message.find_gradients()
    storages = {storage_key(gradient) for gradient in gradients}
    if storage_key(message.tensor) in storages or _has_size_of(message, gradients):
        return MessageClass(message.key, message.context.module, "after backward")
    return None


def by_training_loop(message: Message) -> MessageClass | None:
    """Match all other messages: functional collectives are of activations, as in a loss."""
    if message.call.op.namespace == "c10d":
        return _UNDECLARED
    return MessageClass("activations", message.context.module, message.context.phase)


RULES: tuple[Callable[[Message], MessageClass | None], ...] = (
    in_optimizer_step,
    in_fsdp_block,
    point_to_point,
    in_backward,
    sends_parameter,
    in_forward,
    sends_gradients,
    by_training_loop,
)


def classify_message(message: Message) -> MessageClass:
    """Return the class of a message by the first rule that matches."""
    for rule in RULES:
        message_class = rule(message)
        if message_class is not None:
            return message_class
    return _UNDECLARED


def _has_size_of(message: Message, gradients: list[Tensor]) -> bool:
    """Return whether a reduction has as many elements as a gradient, or as all of them."""
    is_reduction = message.call.op.namespace == "c10d" and message.key == "grad_reduce"
    if not is_reduction or message.tensor.dim() == 0:
        return False
    # A message that is wider than the gradients, such as the norm of a step, has none of them.
    item_size = message.tensor.dtype.itemsize
    sizes = [gradient.numel() for gradient in gradients if gradient.dtype.itemsize >= item_size]
    return message.tensor.numel() in {sum(sizes), *sizes}


def _leaf_behind(node: Any) -> Tensor | None:
    """Return the leaf to which an autograd node passes a gradient on unchanged."""
    while node is not None and not hasattr(node, "variable"):
        next_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
        if len(next_nodes) != 1 or _PASSTHROUGH_NODES.fullmatch(type(node).__name__) is None:
            return None
        node = next_nodes[0]
    leaf: Tensor | None = None if node is None else node.variable
    return leaf
