"""What one step really uses, for a contract: parameters, products, norms, messages, states.

A TorchDispatchMode sees kernels and collectives with their tensors, in every layout; dynamo is told
to compile and run as if it were not there. Parameters and states are looked at when the step ended.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from distamp.optim_utils import params_of, unwrap_optimizer, zero_local_optimizer
from distamp.report.following import Follower, Kernel, group_of, held_by, storage_of, tensors_in
from distamp.report.op_row import collapsed
from distamp.report.rows import short

__all__ = ["Observer", "Seen"]

_PRODUCT = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|mv|addmv|dot|matmul|linear|gemm)(_|$)"
    r"|^_?(\w+_)?conv(olution|\d|_)|attention|_rnn|lstm|gru"
)
_NORM = re.compile(r"(layer|batch|group|rms|instance)_norm")
# What a norm that is written in Python adds up with.
_STATISTICS = frozenset({"mean", "var", "var_mean", "std", "sum", "rsqrt", "linalg_vector_norm"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
# What sends nothing, or is seen where it is sent.
_NO_DATA = ("wait_tensor", "_wrap", "barrier", "monitored", "check", "recv", "irecv")
_CASTS = frozenset({"_to_copy", "clone", "convert_element_type"})
# Autograd nodes that only hand a gradient on.
_HANDS_ON = re.compile(
    r"(ToCopy|View|UnsafeView|T|Transpose|Alias|Detach|\w*Redistribute|_ToTorchTensor"
    r"|_FromTorchTensor)Backward\d*"
)


class Seen(NamedTuple):
    """One thing that ran or stood in one dtype.

    Args:
        key: The field of the contract, such as ``"grad_reduce"``.
        where: A module or a parameter.
        found: The dtype, by its short name.
        op: The kernel or collective; ``""`` of what stands.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, ``"optimizer"``; ``""`` of what
            stands.
        group: The ranks of a collective, such as ``"mesh_tp[2]"``.
    """

    key: str
    where: str
    found: str
    op: str = ""
    phase: str = ""
    group: str = ""


class Observer(Follower):
    """Counts what a contract speaks of while a step runs; see `Seen`.

    Args:
        models: Whose modules have names.
        optimizers: Whose states are looked at.
        hooks: States of communication hooks, which tell what they sent by threads of their own.
    """

    eager = False

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        hooks: Sequence[Any] = (),
    ) -> None:
        super().__init__(*models)
        #: How often each was seen, and in how many bytes.
        self.seen: dict[Seen, tuple[int, int]] = {}
        self._optimizers = [unwrap_optimizer(each) for each in optimizers]
        states = [*hooks, *(getattr(each, "_comm_hook_state", None) for each in self.names)]
        states += [state for each in self.names for _, state in getattr(each, "_comm_hooks", ())]
        self._hooks = {id(each): each for each in states if hasattr(each, "stats")}
        self._lock = threading.Lock()
        self._ran: set[nn.Module] = set()
        # Where parameters are, and casts of them; and of what was packed into bytes, its dtype.
        self._stored: dict[object, str] = {}
        self._packed: dict[object, str] = {}
        # Open blocks of torch.profiler.record_function: FSDP and optimizers say there what they do.
        self._blocks: list[str] = []

    def opens(self, types: Iterable[type]) -> bool:
        """See what a DTensor runs and sends."""
        return any(each.__name__ == "DTensor" for each in types)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what runs in the block, and what stands at its end."""
        self._stored = {storage_of(each): name for each, name in self.named_parameters()}
        before = {key: Counter(hook.stats().bytes_sent) for key, hook in self._hooks.items()}
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
            stack.enter_context(self.following())
            yield
        for key, hook in self._hooks.items():
            for sent, size in (Counter(hook.stats().bytes_sent) - before[key]).items():
                # A hook that gathers weights counts them as "int8 weights".
                wire = sent.removesuffix(" weights")
                part, phase = (
                    ("grad_reduce", "backward") if wire == sent else ("param_all_gather", "forward")
                )
                seen = Seen(part, "", wire, "communication hook", phase)
                self.seen[seen] = 1, int(size)
        for each, name in self.named_parameters():
            if each.is_floating_point():
                self._count(Seen("parameters", name, short(each.dtype)), each)
        for optimizer in self._optimizers:
            self._look_at_state(zero_local_optimizer(optimizer) or optimizer)

    def named_parameters(self) -> list[tuple[Tensor, str]]:
        """Return every parameter as it is now, with its name; FSDP1's flat ones too."""
        held = [(each, name) for kind, name, _, each in held_by(self.names) if kind == "parameter"]
        flats = [(getattr(each, "_flat_param", None), name) for each, name in self.names.items()]
        held += [
            (each, f"{name}.flat_param".lstrip(".")) for each, name in flats if each is not None
        ]
        return [*{id(each): (each, name) for each, name in held}.values()]

    # -- what modules and optimizers do --------------------------------------------------------

    def entered(self, module: nn.Module) -> None:
        """Count what a norm's own parameters are."""
        self._ran.add(module)
        if _is_norm(module):
            frame = self.frames()[-1]
            for each in module.parameters(recurse=False):
                found = short(each.dtype)
                self._count(Seen("norms", frame.name, found, "weight", frame.phase), each)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        inner = zero_local_optimizer(optimizer) or optimizer
        for index, each in enumerate(params_of(inner)):
            # An optimizer that keeps masters of its own has them in its state.
            state = inner.state.get(each, {})
            masters = tensors_in([state[name] for name in state if "master" in str(name)])
            for one in masters or [each]:
                self._count(Seen("master_weights", self._name(each, index), short(one.dtype)), one)

    def _look_at_state(self, optimizer: torch.optim.Optimizer) -> None:
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            for name, value in state.items() if isinstance(state, Mapping) else ():
                for each in tensors_in(value):
                    # Counts of steps and rates are numbers.
                    if each.dim() and "master" not in str(name):
                        where = f"{self._name(parameter, index)} ({name})"
                        self._count(Seen("optimizer_state", where, short(each.dtype)), each)

    def _name(self, parameter: Any, index: int) -> str:
        """A parameter's name; of a master, which is no parameter of the model, its place."""
        return self.parameters.get(id(parameter), (f"parameter {index} of the optimizer",))[0]

    # -- what runs -----------------------------------------------------------------------------

    def record(self, kernel: Kernel, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Count one kernel or collective, if a contract speaks of it."""
        name, namespace = kernel.name, kernel.namespace
        if self.closed:
            return
        if namespace == "profiler":
            if "exit" not in name:
                self._blocks.append(str(args[0]))
            elif self._blocks:
                self._blocks.pop()
        elif namespace in _COLLECTIVES:
            self._collective(name, namespace, args)
        elif name in _CASTS or (name == "view" and isinstance(args[-1], torch.dtype)):
            self._derived(name, args[0], out)
        elif _PRODUCT.search(name) is not None:
            self._kernel("compute", name, args)
        elif _NORM.search(name) is not None or name in _STATISTICS:
            self._kernel("norms", name, args)

    def _derived(self, name: str, source: Tensor, out: Tensor) -> None:
        """Remember casts of parameters, and the dtype of what was packed into bytes."""
        if name != "view" and (stored := self._stored.get(storage_of(source))) is not None:
            self._stored[storage_of(out)] = stored
        elif source.is_floating_point() and not out.is_floating_point():
            self._packed[storage_of(source)] = short(source.dtype)

    def _kernel(self, key: str, name: str, args: Any) -> None:
        owner, phase, _ = self.running()
        module = self.frames()[-1].module if self.frames() else None
        floating = [each for each in tensors_in(args) if each.is_floating_point()]
        if not floating or self._inside("Optimizer.step"):
            return
        if key == "compute":
            # Tables of positions are not what is trained, nor is what runs beside the model.
            tables = module is not None and "rotary" in type(module).__name__.lower()
            beside = phase == "forward" and module is None
            if tables or (beside and not any(each.requires_grad for each in floating)):
                return
            floating = floating[:1]
        elif phase == "backward" or (name in _STATISTICS and not _is_norm(module)):
            return
        for found in dict.fromkeys(short(each.dtype) for each in floating):
            self._count(Seen(key, owner.module, found, name, phase), floating[0])

    def _collective(self, name: str, namespace: str, args: Any) -> None:
        """Count what this rank gives into a collective, and find out what it is a part of."""
        sent = (len(args) > 1 and tensors_in(args[1])) or tensors_in(args[0])
        if not sent or name.startswith(_NO_DATA) or sum(each.numel() for each in sent) < 2:
            return
        key, where, phase = self._part(name, namespace, sent[0])
        found = short(sent[0].dtype)
        if not sent[0].is_floating_point():
            # Numbers that were packed into bytes are told by what they were; others are counts.
            found = self._packed.get(storage_of(sent[0]), "")
        if key and found:
            group = group_of(args[1:])
            ranks = group.group_desc.replace("default_pg", "all ranks") if group else ""
            ranks += f"[{group.size()}]" if group else ""
            self._count(Seen(key, where, found, name.strip("_"), phase, ranks), *sent)

    def _part(self, name: str, namespace: str, sent: Tensor) -> tuple[str, str, str]:
        """What a message is of (key; "" if of nothing that a contract speaks of), whose, when."""
        owner, phase, node = self.running()
        part = "param_all_gather" if "gather" in name or "broadcast" in name else "grad_reduce"
        block = self._blocks[-1] if self._blocks else ""
        stored = self._stored.get(storage_of(sent))
        if self._inside("Optimizer.step"):
            return part, stored or "", "optimizer"
        if block.startswith(("FSDP::", "FullyShardedDataParallel._")):
            named = re.search(r"\((.*)\)", block)
            return part, named[1] if named else "" if "::" in block else owner.module, phase
        if "send" in name:
            return "activations", owner.module, phase
        if phase == "backward":
            # What a reentrant checkpoint was given is a leaf, and no parameter.
            leaf = _handed_to(node)
            parameter = self.parameters.get(id(leaf))
            if parameter is None and node is not None:
                return "activations", owner.module, phase
            # A bucket is no single parameter's.
            alone = leaf is not None and leaf.numel() == sent.numel()
            return "grad_reduce", parameter[0] if parameter and alone else "", phase
        if stored is not None:
            return "param_all_gather", stored, phase
        if self.frames() or self._inside("DistributedDataParallel"):
            # In its forward pass DDP broadcasts buffers.
            return "" if "broadcast" in name else "activations", owner.module, phase
        gradients = [each.grad for each, _ in self.named_parameters() if each.grad is not None]
        if self._is_of(gradients, namespace, part, sent):
            return "grad_reduce", owner.module, "after backward"
        return "" if namespace == "c10d" else "activations", owner.module, phase

    def _is_of(self, gradients: list[Tensor], namespace: str, part: str, sent: Tensor) -> bool:
        """Whether a message that is sent by hand is of gradients: by its storage, or its size."""
        if storage_of(sent) in map(storage_of, gradients):
            return True
        # What is wider than gradients, as the norm of a step is, is none of them.
        sent_as = sent.dtype.itemsize
        numels = [each.numel() for each in gradients if each.dtype.itemsize >= sent_as]
        sizes = {sum(numels), *numels}
        return (
            namespace == "c10d"
            and part == "grad_reduce"
            and sent.dim() > 0
            and sent.numel() in sizes
        )

    def _inside(self, block: str) -> bool:
        return any(each.startswith(block) for each in self._blocks)

    def _count(self, seen: Seen, *tensors: Tensor) -> None:
        if any(map(is_fake, tensors)):
            return  # a compiler traces: it did not run, and its sizes may be symbols
        size = sum(each.numel() * each.element_size() for each in tensors)
        with self._lock:
            calls, sizes = self.seen.get(seen, (0, 0))
            self.seen[seen] = calls + 1, sizes + size

    def unseen(self) -> list[str]:
        """Return what was not looked into, and what did not run, a sentence each."""
        compiled = {self.names[each] for each in self.compiled}
        outer = [name for name in compiled if not name or name.rpartition(".")[0] not in compiled]
        idle = {
            name
            for module, name in self.names.items()
            if module not in self._ran | self.compiled and [*module.parameters(recurse=False)]
        }
        inside = "compiled; products and messages were seen, norms and what fused kernels do "
        said = ((outer, f"{inside}inside were not"), (idle, "did not run in this step"))
        return [f"{_together(names)}: {what}" for names, what in said if names]


def _together(names: Collection[str]) -> str:
    """Names for people, those alike but for an index as one."""
    shown = collapsed((name, "") for name in names)
    return ", ".join(sorted({name or "(model)" for name in shown.values()}))


def _is_norm(module: nn.Module | None) -> bool:
    named = module is not None and "norm" in type(module).__name__.lower()
    return named and not [*module.children()]  # type: ignore[union-attr]


def _handed_to(node: Any) -> Tensor | None:
    """The leaf whose gradient an autograd node only hands on."""
    while node is not None and not hasattr(node, "variable"):
        behind = [each for each, _ in node.next_functions if each is not None]
        if len(behind) != 1 or _HANDS_ON.fullmatch(type(node).__name__) is None:
            return None
        node = behind[0]
    return None if node is None else node.variable
