"""ContractRecorder: the dtypes that a step uses, as far as a contract declares them."""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from distamp.fsdp_params import sharded_params
from distamp.optim_utils import params_of, unwrap_optimizer, view_of, zero_local_optimizer
from distamp.report.collectives import CollectiveCall
from distamp.report.formatting import NO_MODULE, collapse_indices, dtype_abbr, is_norm
from distamp.report.messages import Message, MessageClass, RecordFunctionStack, classify_message
from distamp.report.tensors import flatten_tensors, model_tensors, storage_key
from distamp.report.tracing import (
    ModuleFrame,
    OpCall,
    OpContext,
    StepTracer,
    TraceListener,
    is_called_by_compile,
)

__all__ = ["ContractRecorder", "Observation", "RankObservations"]

_PRODUCT = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|mv|addmv|dot|matmul|linear|gemm)(_|$)"
    r"|^_?(\w+_)?conv(olution|\d|_)|attention|_rnn|lstm|gru"
)
_NORM = re.compile(r"(layer|batch|group|rms|instance)_norm")
# Reductions for the mean or the variance of a row, in a norm that is written in Python.
_STATISTICS = frozenset({"mean", "var", "var_mean", "std", "sum", "linalg_vector_norm"})
# Ops between such a mean and its root, as for an epsilon.
_SHIFTS = frozenset({"add", "add_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})
_ROOTS = frozenset({"rsqrt", "rsqrt_", "sqrt", "sqrt_"})
_DIVISIONS = frozenset({"div", "div_"})
_CASTS = frozenset({"_to_copy", "clone", "convert_element_type"})
# The kinds of ops that a contract looks at besides products and norms.
_NAMES_BY_KIND = {
    "cast": _CASTS,
    "view": frozenset({"view"}),
    "packing": frozenset({"all_gather_copy_in"}),
    "statistic": _STATISTICS | _ROOTS,
    "shift": _SHIFTS,
    "division": _DIVISIONS,
}
_MESSAGE_KEYS = ("param_all_gather", "grad_reduce", "activations")
# Reasons for which a step may have no observation of a key.
_REASONS = {
    "parameters": "the model has no floating point parameters",
    "compute": "no product of trained tensors ran",
    "norms": "no norm ran",
    "param_all_gather": "no rank sent any, as FSDP and sharded optimizers do",
    "grad_reduce": "no rank sent any, as DDP and FSDP do",
    "activations": "no module sent any",
    "master_weights": "the optimizers have no parameters",
    "optimizer_state": "the optimizers keep no tensors, as SGD without momentum",
}


class Observation(NamedTuple):
    """A place in a step, and a dtype that it used.

    Attributes:
        key: The field of the contract, such as ``"grad_reduce"``.
        name: The name of a module or parameter.
        dtype: The short name of the dtype.
        op: The op; ``""`` for parameters, master weights and optimizer state.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, ``"after backward"`` or
            ``"optimizer"``; ``""`` for parameters, master weights and optimizer state.
        group: The ranks of a collective, such as ``"mesh_tp[2]"``.
        is_compiled: Whether compiled code ran the op, which then may belong to any module inside
            ``name``.
    """

    key: str
    name: str
    dtype: str
    op: str = ""
    phase: str = ""
    group: str = ""
    is_compiled: bool = False


class RankObservations(NamedTuple):
    """The observations of one rank, which the ranks exchange.

    Attributes:
        counts: The number of calls or tensors of each observation, and their bytes.
        not_checked: Sentences about modules that were not checked.
        unhooked_modules: The names of modules that ran in compiled code or did not run.
        reasons: The reason for which a key has no observation, by key.
        ran_compiled: Whether a part of the step ran compiled.
    """

    counts: dict[Observation, tuple[int, int]]
    not_checked: list[str]
    unhooked_modules: tuple[str, ...]
    reasons: dict[str, str]
    ran_compiled: bool

    def replace_keys(self, keys: Collection[str], eager: RankObservations) -> RankObservations:
        """Return these observations with the observations of some keys from an eager run.

        Sentences about modules are of the eager run, too.
        """
        counts = {}
        reasons = {}
        for run in (self, eager):
            is_eager = run is eager
            for row, count in run.counts.items():
                if (row.key in keys) == is_eager:
                    counts[row] = count
            for key, reason in run.reasons.items():
                if (key in keys) == is_eager:
                    reasons[key] = reason
        return self._replace(counts=counts, reasons=reasons, not_checked=eager.not_checked)


class ContractRecorder(TraceListener):
    """Listener that counts the dtypes of products, norms and messages, and of a model's tensors.

    Args:
        optimizers: The optimizers with the master weights and states.
        hooks: Communication hooks, which send from threads of their own and count their bytes.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], hooks: Sequence[Any] = ()
    ) -> None:
        self._optimizers = [unwrap_optimizer(optimizer) for optimizer in optimizers]
        self._hooks = hooks
        self._counts: dict[Observation, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._hooked: set[nn.Module] = set()
        self._ran_compiled = False
        self._ran_compiled_function = False
        self._took_step = False
        # The ids of parameters that had a gradient when an optimizer stepped them.
        self._trained: set[int] = set()
        self._blocks = RecordFunctionStack()
        # By storage: the name of the parameter or of the cast parameter; the dtypes of packed
        # bytes; and the rows, on the meta device, that a mean in the storage was taken of.
        self._param_names: dict[object, str] = {}
        self._packed_dtypes: dict[object, tuple[str, ...]] = {}
        self._statistics: dict[object, Tensor] = {}
        self._handlers = {
            "cast": self._follow_cast,
            "view": self._follow_bytes,
            "packing": self._follow_packed,
            "product": self._count_product,
            "norm": self._count_norm,
            "statistic": self._count_statistic,
            "shift": self._follow_statistic,
            "division": self._count_division,
        }

    def on_start(self) -> None:
        """Remember the storages of parameters."""
        for param, name in self._params():
            self._param_names[storage_key(param)] = name

    def unwraps(self, types: Iterable[type]) -> bool:
        """See the ops and messages of a DTensor."""
        return any(tensor_type.__name__ == "DTensor" for tensor_type in types)

    @contextmanager
    def record(self, tracer: StepTracer) -> Iterator[None]:
        """Record the step in the block, and the model's and optimizers' tensors at its end.

        Args:
            tracer: The tracer of this listener.
        """
        hooks = self._find_hooks()
        sent_before = [Counter(hook.stats().bytes_sent) for hook in hooks]
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                handle = optimizer.register_step_pre_hook(self._on_optimizer_step)
                stack.callback(handle.remove)
            stack.enter_context(tracer)
            yield
        for hook, sent in zip(hooks, sent_before, strict=True):
            self._count_bytes_of_hook(Counter(hook.stats().bytes_sent) - sent)
        for param, name in self._params():
            if param.is_floating_point():
                dtype = dtype_abbr(param.dtype)
                self._count(Observation("parameters", name, dtype), param)
        for optimizer in self._optimizers:
            self._count_state(zero_local_optimizer(optimizer) or optimizer)

    @property
    def result(self) -> RankObservations:
        """The observations, once the step has ended."""
        unhooked = []
        for module, name in self.tracer.names.items():
            if module not in self._hooked:
                unhooked.append(name)
        ran_compiled = self._ran_compiled or bool(self.tracer.compiled_modules)
        reasons = self._reasons(ran_compiled)
        return RankObservations(
            self._counts, self._not_checked(), tuple(unhooked), reasons, ran_compiled
        )

    def _reasons(self, ran_compiled: bool) -> dict[str, str]:
        """Return the reason for each key that has no observation."""
        reasons = dict(_REASONS)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size == 1:
            reasons.update(dict.fromkeys(_MESSAGE_KEYS, "a single rank sends nothing"))
        if ran_compiled:
            reasons["compute"] = "compiled code computed all products inside its kernels"
            reasons["norms"] = "compiled code computed all norms inside its kernels"
        if not self._optimizers:
            reasons["master_weights"] = reasons["optimizer_state"] = "no optimizer was passed"
        elif not self._took_step:
            reasons["master_weights"] = "no optimizer took a step"
        for key, *_ in self._counts:
            reasons.pop(key, None)
        return reasons

    # -- modules and optimizers ----------------------------------------------------------------

    def _params(self) -> list[tuple[Tensor, str]]:
        """Return the present parameters with their names, and the flat parameters of FSDP1."""
        params = []
        for row in model_tensors(self.tracer.names):
            if row.kind == "parameter":
                params.append((row.tensor, row.name))
        for module, name in self.tracer.names.items():
            flat_param = getattr(module, "_flat_param", None)
            if flat_param is not None:
                flat_name = f"{name}.flat_param"
                params.append((flat_param, flat_name.lstrip(".")))
        # A parameter that several modules hold counts once, by its last name.
        params_by_id = {id(param): (param, name) for param, name in params}
        return list(params_by_id.values())

    def _find_hooks(self) -> list[Any]:
        """Return the caller's communication hooks, and the hooks on modules."""
        states = list(self._hooks)
        for module in self.tracer.names:
            states.append(getattr(module, "_comm_hook_state", None))
            states += [state for _, state in getattr(module, "_comm_hooks", ())]
        hooks = {id(state): state for state in states if hasattr(state, "stats")}
        return list(hooks.values())

    def on_module(self, frame: ModuleFrame) -> None:
        """Count the parameters of a norm."""
        self._hooked.add(frame.module)
        if is_norm(frame.module):
            for param in frame.module.parameters(recurse=False):
                dtype = dtype_abbr(param.dtype)
                self._count(Observation("norms", frame.name, dtype, "weight", frame.phase), param)

    def _on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the master weights of an optimizer, or the parameters that it steps."""
        # An optimizer takes roots too, and no norm runs after this.
        self._statistics.clear()
        self._took_step = True
        for param, stepped in view_of(optimizer).param_pairs():
            if param.grad is not None or stepped.grad is not None:
                self._trained.add(id(param))
        inner = zero_local_optimizer(optimizer) or optimizer
        for index, param in enumerate(params_of(inner)):
            # Some optimizers keep master weights in their state.
            masters = []
            for state_name, value in inner.state.get(param, {}).items():
                if "master" in str(state_name):
                    masters += flatten_tensors(value)
            name = self._name_of_param(param, index)
            for tensor in masters or [param]:
                dtype = dtype_abbr(tensor.dtype)
                self._count(Observation("master_weights", name, dtype), tensor)

    def _count_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the state of an optimizer, except master weights and numbers."""
        for index, (param, state) in enumerate(optimizer.state.items()):
            if not isinstance(state, Mapping):
                continue
            param_name = self._name_of_param(param, index)
            for name, value in state.items():
                for tensor in flatten_tensors(value):
                    if tensor.dim() and "master" not in str(name):
                        state_name = f"{param_name} ({name})"
                        dtype = dtype_abbr(tensor.dtype)
                        self._count(Observation("optimizer_state", state_name, dtype), tensor)

    def _name_of_param(self, param: Any, index: int) -> str:
        """Return a parameter's name; a master weight, which no module holds, has an index."""
        name, _ = self.tracer.params.get(id(param), (f"parameter {index} of the optimizer", ""))
        return name

    def _count_bytes_of_hook(self, bytes_sent: Mapping[str, int]) -> None:
        """Count the messages of a communication hook.

        Args:
            bytes_sent: Bytes by format; the format of gathered weights ends with " weights".
        """
        for label, size in bytes_sent.items():
            comm_format = label.removesuffix(" weights")
            key, phase = "grad_reduce", "backward"
            if comm_format != label:
                key, phase = "param_all_gather", "forward"
            observation = Observation(key, "", comm_format, "communication hook", phase)
            self._counts[observation] = 1, int(size)

    # -- ops -----------------------------------------------------------------------------------

    def after_op(self, call: OpCall) -> None:
        """Count an op if its dtype is part of a contract."""
        if call.op.namespace == "profiler":
            self._blocks.on_op(call)
        elif not call.collectives:
            handler = self._handlers.get(_kind_of_op(call.op.name))
            if handler is not None:
                handler(call)

    def _follow_cast(self, call: OpCall) -> None:
        """Give a cast of a parameter the parameter's name."""
        name = self._param_names.get(storage_key(call.args[0]))
        if name is not None:
            self._param_names[storage_key(call.output)] = name

    def _follow_bytes(self, call: OpCall) -> None:
        """Remember the dtype of a floating point tensor that is viewed as bytes."""
        if not isinstance(call.args[-1], torch.dtype):
            return
        source = call.args[0]
        if source.is_floating_point() and not call.output.is_floating_point():
            self._packed_dtypes[storage_key(source)] = (dtype_abbr(source.dtype),)

    def _follow_packed(self, call: OpCall) -> None:
        """Remember the dtypes that FSDP2 packs into the bytes of one all-gather."""
        sources, *_ = call.args
        dtypes: dict[str, None] = {}
        for source in sources:
            dtypes.update(dict.fromkeys(self._packed_dtypes.get(storage_key(source), ())))
        if dtypes:
            self._packed_dtypes[storage_key(call.output[0])] = tuple(dtypes)

    def _count_product(self, call: OpCall) -> None:
        """Count the first operand of a product, if it takes part in training."""
        tensors = _floating_tensors(call)
        if not tensors or self._blocks.is_inside("Optimizer.step"):
            return
        module = self._module()
        if module is not None and "rotary" in type(module).__name__.lower():
            # A table of positions is computed in float32 and is not trained.
            return
        context = call.context
        is_compiled = self._is_compiled(context)
        is_forward_outside = context.phase == "forward" and module is None
        is_trained = any(tensor.requires_grad for tensor in tensors)
        if is_forward_outside and not is_compiled and not is_trained:
            return
        self._count_op("compute", call, tensors[:1], is_compiled)

    def _count_norm(self, call: OpCall) -> None:
        """Count the inputs and weights of a norm's forward."""
        if call.context.phase == "backward" or self._blocks.is_inside("Optimizer.step"):
            return
        tensors = _floating_tensors(call)
        is_compiled = self._is_compiled(call.context)
        self._count_op("norms", call, tensors, is_compiled)

    def _count_statistic(self, call: OpCall) -> None:
        """Count the input of a mean or variance in a norm that is written in Python.

        Such a norm is a module with the word in its class name, or the root of a mean of rows.
        """
        is_in_norm = is_norm(self._module())
        if not is_in_norm and call.op.name in _ROOTS:
            self._follow_statistic(call)
            return
        tensors = _floating_tensors(call)
        if not tensors or self._blocks.is_inside("Optimizer.step"):
            return
        if call.context.phase == "backward":
            return
        if is_in_norm:
            self._count_op("norms", call, tensors, is_compiled=False)
        else:
            self._remember_statistic(call, tensors[0])

    def _remember_statistic(self, call: OpCall, rows: Tensor) -> None:
        """Remember the rows that an op reduces to their mean or variance."""
        outputs = flatten_tensors(call.output)
        # The mean of a whole tensor is a loss.
        if outputs and outputs[0].dim() and not is_fake(rows):
            # The rows themselves would stay in memory until the step ends.
            size_of_rows = torch.empty(rows.numel(), dtype=rows.dtype, device="meta")
            self._statistics[storage_key(outputs[0])] = size_of_rows

    def _follow_statistic(self, call: OpCall) -> None:
        """Count the rows of a mean before its root, or follow the mean through a sum."""
        if not self._statistics or not isinstance(call.args[0], Tensor):
            return
        rows = self._statistics.get(storage_key(call.args[0]))
        if rows is None:
            return
        if call.op.name not in _ROOTS:
            self._statistics[storage_key(call.output)] = rows
            return
        is_compiled = self._is_compiled(call.context)
        if self.tracer.frames or is_compiled:
            self._count_op("norms", call, [rows], is_compiled)

    def _count_division(self, call: OpCall) -> None:
        """Count rows that are divided by their vector norm, as ``normalize`` does."""
        dividend, divisor, *_ = call.args
        if not self._statistics or not isinstance(divisor, Tensor):
            return
        rows = self._statistics.get(storage_key(divisor))
        if rows is None or call.context.phase == "backward":
            return
        is_compiled = self._is_compiled(call.context)
        is_in_model = bool(self.tracer.frames) or is_compiled
        # A weight norm divides another tensor, with a number for each row.
        if is_in_model and dividend.numel() == rows.numel():
            self._count_op("norms", call, [rows], is_compiled)

    def _count_op(
        self, key: str, call: OpCall, tensors: Sequence[Tensor], is_compiled: bool
    ) -> None:
        """Count an op once for each dtype of its tensors."""
        module = call.context.module
        phase = call.context.phase
        dtypes = dict.fromkeys(dtype_abbr(tensor.dtype) for tensor in tensors)
        for dtype in dtypes:
            observation = Observation(key, module, dtype, call.op.name, phase, "", is_compiled)
            self._count(observation, tensors[0])

    def _module(self) -> nn.Module | None:
        frames = self.tracer.frames
        return frames[-1].module if frames else None

    def _is_compiled(self, context: OpContext) -> bool:
        """Return whether compiled code runs an op, so that its module is not known."""
        if self.tracer.eager:
            return False
        if context.phase == "backward":
            is_compiled = type(context.node).__name__.startswith("CompiledFunction")
        else:
            is_compiled = is_called_by_compile()
        self._ran_compiled = self._ran_compiled or is_compiled
        if is_compiled and context.module == NO_MODULE:
            self._ran_compiled_function = True
        return is_compiled

    # -- messages ------------------------------------------------------------------------------

    def on_collective(self, call: OpCall, collective: CollectiveCall) -> None:
        """Count the tensors that this rank passes to a collective, by their class."""
        tensors = collective.inputs or collective.outputs
        numel = sum(tensor.numel() for tensor in tensors)
        if collective.kind == "recv" or numel < 2:
            return
        first = tensors[0]
        param_name = self._param_names.get(storage_key(first), "")
        message = Message(first, collective, call, self._blocks, param_name, self._gradients)
        message_class = classify_message(message)
        if message_class.key:
            self._count_message(message_class, message, tensors)

    def _count_message(
        self, message_class: MessageClass, message: Message, tensors: Sequence[Tensor]
    ) -> None:
        first = tensors[0]
        dtypes: Collection[str] = [dtype_abbr(first.dtype)]
        if not first.is_floating_point():
            # Integers are counts, except numbers that were packed into bytes.
            dtypes = self._packed_dtypes.get(storage_key(first), ())
        key, name, phase = message_class
        op = message.collective.name.strip("_")
        group = message.collective.group_label
        is_compiled = self._is_compiled(message.context)
        for dtype in dtypes:
            observation = Observation(key, name, dtype, op, phase, group, is_compiled)
            self._count(observation, *tensors)

    def _gradients(self) -> list[Tensor]:
        return [param.grad for param, _ in self._params() if param.grad is not None]

    def _count(self, observation: Observation, *tensors: Tensor) -> None:
        # A compiler that traces runs nothing, and its sizes may be symbols.
        if any(map(is_fake, tensors)):
            return
        size = 0
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
        with self._lock:
            calls, total = self._counts.get(observation, (0, 0))
            self._counts[observation] = calls + 1, total + size

    def _not_checked(self) -> list[str]:
        """Return a sentence for modules that are compiled, and for modules that did not run."""
        tracer = self.tracer
        compiled_names = {tracer.names[module] for module in tracer.compiled_modules}
        outermost = []
        for name in compiled_names:
            if not name or name.rpartition(".")[0] not in compiled_names:
                outermost.append(name)
        idle = set()
        for module, name in tracer.names.items():
            params = sharded_params(module.parameters(recurse=False))
            is_trained = False
            if not self._ran_compiled_function:
                # The caller of a module may read its parameters and leave its forward out.
                is_trained = any(id(param) in self._trained for param in params)
            is_followed = module in self._hooked or module in tracer.compiled_modules
            if params and not is_trained and not is_followed:
                idle.add(name)
        sentences = []
        limits = "products and messages were seen, norms and what fused kernels do inside were not"
        if outermost:
            sentences.append(f"{_join_names(outermost)}: compiled; {limits}")
        if idle and self._ran_compiled_function:
            sentences.append(
                f"{_join_names(idle)}: in a function that torch.compile returned, or idle; {limits}"
            )
        elif idle:
            sentences.append(f"{_join_names(idle)}: did not run in this step")
        return sentences


@functools.cache
def _kind_of_op(name: str) -> str:
    """Return the key of the method that handles an op; ``""`` if none does."""
    if _PRODUCT.search(name) is not None:
        return "product"
    if _NORM.search(name) is not None:
        return "norm"
    for kind, names in _NAMES_BY_KIND.items():
        if name in names:
            return kind
    return ""


def _floating_tensors(call: OpCall) -> list[Tensor]:
    return [tensor for tensor in flatten_tensors(call.args) if tensor.is_floating_point()]


def _join_names(names: Collection[str]) -> str:
    """Return module names as text, with modules that differ by an index as one."""
    collapsed = collapse_indices((name, "") for name in names)
    labels = {name or "(model)" for name in collapsed.values()}
    return ", ".join(sorted(labels))
