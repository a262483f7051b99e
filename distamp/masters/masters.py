"""fp32 master parameters: what an optimizer steps in place of a model's fp16 or bf16 ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from distamp.callers import stacklevel_of_caller
from distamp.errors import CallOrderError, ConfigError
from distamp.grads import (
    LocalGrads,
    check_no_fp16,
    is_dtensor,
    local_grads,
    multiply_,
    to_local,
    unscale_group_,
)
from distamp.masters.convert import convert
from distamp.masters.placeholder import allocate, free
from distamp.masters.split import join, split
from distamp.optim_utils import (
    OptimizerView,
    find_closure,
    is_nested_step,
    methods_beyond_torch,
    params_of,
    set_view,
    view_of,
    zero_local_optimizer,
)

__all__ = ["MasterParameters", "master_params", "masters_of", "refuse_held", "refuse_share"]

_LOW = (torch.float16, torch.bfloat16)
_version = operator.attrgetter("_version")


@dataclass(eq=False, slots=True)
class _Pair:
    """A parameter of the model and its master.

    Args:
        parameter: float16 or bfloat16.
        master: float32, of the same shape.
        remainder: int16, what the rounding took, of this rank's part; None where the master has
            storage of its own.
        seen: How often parameter and master had been written to when the one last was the rounding
            of the other; not counting ``.data``.
        fresh: Whether no step has compared them yet.
        grad_freed: Whether a conversion freed a dense gradient of the parameter, and no
            ``zero_grad()`` has set it to None since. torch's ``zero_grad(set_to_none=False)`` would
            find that gradient and keep zeros.
    """

    parameter: Tensor
    master: Tensor
    remainder: Tensor | None = None
    seen: tuple[int, ...] = ()
    fresh: bool = True
    grad_freed: bool = False

    @property
    def row(self) -> Any:
        """This rank's part of value, weight and remainder, as `split` and `join` take them."""
        return to_local(self.master), to_local(self.parameter), self.remainder

    def catch_up(self) -> None:
        """Take over what anything but the optimizer wrote to the parameter.

        An element that is still its master's rounding keeps the master: weights that were swapped
        out and back, or a checkpoint of the very same step, cost no precision.

        Collectives, and what writes to this rank's part of a DTensor (``dcp.load`` in place), are
        not counted. So before the first step, and always of a DTensor, values are compared, unless
        the master was written to.
        """
        now, unsure = self.written(), self.fresh or is_dtensor(self.parameter)
        if now[:2] == self.seen[:2] and (not unsure or now[2:] != self.seen[2:]):
            return
        value, weight, remainder = self.row
        if remainder is None:
            same = value.to(weight.dtype) == weight
            torch.where(same, value, weight, out=value)
        else:  # which elements were written is not known; and zero has none below it
            remainder.masked_fill_((weight == 0) & (remainder < 0), 0)
        self.remember()

    def master_was_written(self) -> bool:
        """Return whether something wrote to the master alone since both were last compared."""
        now = self.written()
        return now[2:] != self.seen[2:] and now[:2] == self.seen[:2]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the parameter's gradient and the master's, as ``Optimizer.zero_grad`` does.

        With ``set_to_none=False``, the parameter keeps zeros if it has a gradient, or had one that
        was freed: so a layer that the next loss leaves out still decays and follows its momentum.
        """
        grad = self.parameter.grad
        if set_to_none:
            self.parameter.grad = None
            self.grad_freed = False
        elif grad is not None:
            grad.detach_() if grad.grad_fn is not None else grad.requires_grad_(False)
            grad.zero_()
        elif self.grad_freed:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.master.grad = None

    def remember(self) -> None:
        """Remember that the parameter is its master's rounding now."""
        self.seen, self.fresh = self.written(), False

    def written(self) -> tuple[int, ...]:
        """Return how often parameter and master were written to, whole and this rank's parts."""
        parameter, master = self.parameter, self.master
        if not is_dtensor(parameter):  # asked of each in every step
            return _version(parameter), 0, _version(master), 0
        both = (parameter, to_local(parameter), master, to_local(master))
        return tuple(map(_version, both))


class MasterParameters(OptimizerView):
    """fp32 copies of an optimizer's fp16 and bf16 parameters, which it steps instead of these.

    Differs from ``apex.amp`` in that the masters are in the optimizer's ``param_groups`` and two of
    torch's hooks around ``step`` convert the gradients and write the parameters back.
    ``optimizer.zero_grad`` is wrapped on the optimizer, as torch's learning-rate schedules wrap
    ``step``: it clears the model's gradients too. State that the optimizer has in float32 moves to
    the masters. Parameters of other dtypes (a batch norm in float32) do not change, and frozen ones
    get a master in the first step after they begin to require gradients.

    Masters are elementwise on what this rank holds: a parameter that is a DTensor (FSDP2, HSDP,
    tensor parallel) has a master that is one, with the same placements.

    With ``split=True`` a master is its bfloat16 parameter and a 16-bit remainder, exactly, so it
    takes 2 bytes an element in place of 4. The float32 values exist inside ``optimizer.step()``
    and `materialized` alone; between steps the masters in ``param_groups`` read as NaN. Parameters
    are then rounded half away from zero, not to nearest even.

    Create it once, after you cast and wrap the model and create the optimizer. With
    `DistGradScaler`, ``fp16_grads="master"`` unscales in float32 into the masters; without a scaler
    the gradients are used as they are. In both cases the model's own gradients are freed as they
    are converted, so none is counted twice.

    Args:
        optimizer: Has float16 or bfloat16 parameters; may have state already.
        split: Whether masters are bfloat16 parameters and remainders.
        allow_empty: Whether the optimizer may have no float16 or bfloat16 parameter yet, because
            ``add_param_group`` brings the first ones later.

    Raises:
        TypeError: Not an optimizer.
        ValueError: No parameter needs a master and ``allow_empty`` is False, the optimizer has
            masters already, or it steps
            flat parameters (FSDP1) or this rank's share (ZeroRedundancyOptimizer, OSS), its state
            is in half precision (it was loaded too early), or a parameter to split is float16.

    Example::

        model = model.half()
        optimizer = torch.optim.AdamW(model.parameters())
        masters = MasterParameters(optimizer)
        scaler = DistGradScaler("cuda", fp16_grads="master")

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    """

    has_masters = True

    # What survives a call:
    # _optimizer: weakly, because the optimizer holds this object.
    # _pairs: the parameters, because the optimizer holds masters alone.
    # _joined: masters have their values, and whatever made them writes the parameters back. True
    #     inside a step, a method of the optimizer, or `materialized`.
    # _inside_method: a method of the optimizer runs, which `_run_method` called.
    # _rebuilt: all masters were made from weights, and no step, load or write changed them since.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        split: bool = False,
        allow_empty: bool = False,
    ) -> None:
        _refuse(optimizer, split, allow_empty)
        self.split = split
        self._optimizer = weakref.ref(optimizer)
        self._pairs: dict[int, _Pair] = {}  # by id(master)
        self._joined = False
        self._inside_method = False
        self._rebuilt = True
        self._adopt()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        # Of what has no master yet, torch would round the state to half precision.
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.zero_grad = self._reaching_the_model(optimizer)  # type: ignore[method-assign]
        optimizer.__getstate__ = self.__getstate__  # type: ignore[method-assign]
        for name, method in methods_beyond_torch(type(optimizer)):
            setattr(optimizer, name, self._wrapped_method(method))
        set_view(optimizer, self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy or a pickle, of the optimizer too: its masters would have no model."""
        raise CallOrderError(
            "master parameters, and an optimizer that has them, cannot be copied or pickled: copy "
            "the model, make an optimizer and MasterParameters(optimizer) for it (initialize does "
            "that), and load their state_dict()"
        )

    # -- who belongs to whom ----------------------------------------------------------------------

    def _held(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise CallOrderError("the optimizer of these master parameters is gone")
        return optimizer

    def _adopt(self) -> list[_Pair]:
        """Make masters for parameters that came since; return the pairs in the groups' order."""
        optimizer = self._held()
        found: list[_Pair] = []
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                pair = self._pairs.get(id(parameter))
                if pair is None and parameter.dtype in _LOW and parameter.requires_grad:
                    pair = self._made(parameter, optimizer)
                    group["params"][place] = pair.master
                if pair is not None:
                    found.append(pair)
        return found

    @torch.no_grad()
    def _made(self, parameter: Tensor, optimizer: torch.optim.Optimizer) -> _Pair:
        _refuse_flat(parameter)
        _refuse_rounded(type(optimizer).__name__, parameter, optimizer.state.get(parameter, {}))
        if any(pair.parameter is parameter for pair in self._pairs.values()):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a master in this optimizer "
                "already; two would differ, so give it to the optimizer once"
            )
        # No nn.Parameter: of one that is a DTensor, to_local() is a view, not what it holds.
        pair = _Pair(parameter, parameter.detach().float().requires_grad_())
        pair.seen = pair.written()
        if self.split:
            _refuse_split(type(optimizer).__name__, [parameter])
            pair.remainder = torch.zeros_like(to_local(parameter), dtype=torch.int16)
            if not self._joined:
                free(pair.master)
        self._pairs[id(pair.master)] = pair
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            wide = {key: v.float() if _is_low(v) else v for key, v in state.items()}
            optimizer.state[pair.master] = wide
        return pair

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model with its master, in the optimizer's order."""
        for pair in self._adopt():
            yield pair.parameter, pair.master

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """Return the master of a parameter of the model; None if it has none."""
        return next((master for p, master in self.pairs() if p is parameter), None)

    def model_params(self) -> list[Tensor]:
        """See `OptimizerView.model_params`: the model's own."""
        return [parameter for parameter, _ in self.param_pairs()]

    def param_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See `OptimizerView.param_pairs`: masters, and parameters that have none."""
        behind = {id(master): parameter for parameter, master in self.pairs()}
        return [(behind.get(id(p), p), p) for p in params_of(self._held())]

    @property
    def holder(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """See `OptimizerView`: the optimizer, which no wrapper with shares has."""
        return self._held()

    @property
    def base(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """See `OptimizerView`: the optimizer."""
        return self._held()

    def has_grads(self) -> bool:
        """See `OptimizerView.has_grads`."""
        for param, stepped in self.param_pairs():
            if param.grad is not None or stepped.grad is not None:
                return True
        return False

    def measured_grads(self) -> LocalGrads:
        """See `OptimizerView.measured_grads`: gradients of masters, with the model's parameters."""
        pairs = [pair for pair in self.param_pairs() if pair[1].grad is not None]
        grads = local_grads(stepped for _, stepped in pairs)
        params = [param for param, _ in pairs]
        return LocalGrads(params, grads.grads, grads.values, grads.are_plain)

    def multiply_grads_(self, factor: Tensor) -> None:
        """See `OptimizerView.multiply_grads_`: gradients of the model and of its masters."""
        params = self.model_params()
        params += [stepped for param, stepped in self.param_pairs() if param is not stepped]
        multiply_(local_grads(params).values, factor)

    @property
    def nbytes(self) -> int:
        """Bytes that the masters take between steps, on this rank, beside the parameters."""
        rows = [pair.row for pair in self._pairs.values()]
        return sum((value if rest is None else rest).nbytes for value, _, rest in rows)

    # -- gradients --------------------------------------------------------------------------------

    @torch.no_grad()
    def unscale(
        self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Move the model's gradients to the masters, times ``inv_scale``, and free the model's.

        What the masters had is overwritten; one whose parameter has no gradient ends with None.
        Nothing has to call this: the scaler does, and so does ``optimizer.step()`` where the scaler
        has not.

        Raises:
            ConfigError: The model was moved away from its masters.
            ValueError: A frozen parameter, which has no master, has a float16 gradient.
        """
        others = local_grads([p for p, stepped in self.param_pairs() if p is stepped]).values
        check_no_fp16([gradient.dtype for gradient in others])
        flags: dict[torch.device, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():  # placeholders need not be asked
            pairs = self._pairs_with_gradients()
            for _, master in self.pairs():
                master.grad = None
            converted = self._converted(pairs)
            for gradients in itertools.chain(converted, ([gradient] for gradient in others)):
                unscale_group_(gradients, inv_scale, found_inf, flags)
        return flags

    def _pairs_with_gradients(self) -> list[_Pair]:
        """Return the pairs whose parameters have gradients."""
        pairs = [pair for pair in self._adopt() if pair.parameter.grad is not None]
        for pair in pairs:
            if pair.parameter.device != pair.master.device:
                raise ConfigError(
                    f"the model has gradients on {pair.parameter.device} and its masters are on "
                    f"{pair.master.device}: it was moved after MasterParameters was made. Move the "
                    "model first, then make the optimizer and its masters, and load their "
                    "state_dicts"
                )
        return pairs

    def _converted(self, pairs: list[_Pair]) -> Iterator[list[Tensor]]:
        """Move gradients from parameters to masters; yield them as `convert` does."""
        for pair in pairs:
            grad = pair.parameter.grad
            pair.grad_freed = grad is not None and not grad.is_sparse
        return convert((pair.parameter, pair.master) for pair in pairs)

    @contextlib.contextmanager
    def _lent_gradients(self) -> Iterator[None]:
        """Give masters the gradients that the model has, scaled or not, for one method call.

        The model keeps its gradients, because the step is still to come. What the method writes to
        them in place goes into the model's.
        """
        lent: list[tuple[_Pair, Tensor, int]] = []
        for pair in self._pairs_with_gradients():
            if pair.master.grad is None and pair.parameter.grad is not None:
                grad = pair.parameter.grad.float()
                pair.master.grad = grad = grad.coalesce() if grad.is_sparse else grad
                lent.append((pair, grad, _version(to_local(grad))))
        try:
            yield
        finally:
            for pair, grad, version in lent:
                if pair.master.grad is grad:
                    pair.master.grad = None
                    if pair.parameter.grad is not None and _version(to_local(grad)) != version:
                        pair.parameter.grad.copy_(grad)

    def _reaching_the_model(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return ``optimizer.zero_grad``, clearing the model's gradients too."""
        put_on_it = vars(optimizer).get("zero_grad")

        def zero_grad(set_to_none: bool = True) -> None:
            held = self._held()
            clear = put_on_it or functools.partial(type(held).zero_grad, held)
            with torch._C.DisableTorchFunctionSubclass():  # placeholders need not be asked
                clear(set_to_none)
                for pair in self._adopt():
                    pair.zero_grad(set_to_none)
            self._write_back_direct_writes()

        return zero_grad

    # -- other methods of the optimizer ------------------------------------------------------------

    def _wrapped_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the optimizer's class that reaches the model, as its step does."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The class's function takes the optimizer, which this object holds weakly.
            return self._run_method(functools.partial(method, self._held()), args, kwargs)

        return call

    def _run_method(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method over values and gradients of the masters, and write the parameters back."""
        if self._joined:  # inside a step, another method or `materialized`, which writes back
            return method(*args, **kwargs)
        with torch.no_grad():
            self._join()
        self._inside_method = True
        try:
            with self._lent_gradients():
                return method(*args, **kwargs)
        finally:
            self._inside_method = False
            self.write_back()

    # -- around the optimizer's step --------------------------------------------------------------

    @torch.no_grad()
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_nested_step(optimizer) or self._inside_method:
            return
        if find_closure(args[1:], kwargs) is not None:
            raise CallOrderError(
                "step() was given a closure, whose gradients would not reach the masters: run "
                "backward() before step(), or train this optimizer (LBFGS) in float32"
            )
        # All gradients, without a scaler; else what was added by hand, as with torch.
        pairs = self._pairs_with_gradients()
        unscaled = [(pair.master, pair.master.grad) for pair in pairs]
        for _converted in self._converted(pairs):
            pass
        for master, gradient in unscaled:
            if gradient is not None and master.grad is not None:
                master.grad = gradient + master.grad
        if self._rebuilt:
            self._warn_if_resumed(optimizer)
        self._rebuilt = False
        self._join()

    def _before_load(self, *_: Any) -> None:
        self._adopt()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_nested_step(optimizer) or self._inside_method:
            return
        self.write_back()
        for pair in self._pairs.values():
            pair.master.grad = None  # whoever zeroes the model's

    # -- values -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _join(self) -> None:
        """Take over what was written to parameters, and make the values of split masters."""
        self._adopt()
        for pair in self._pairs.values():
            pair.catch_up()
        if self.split:
            for pair in self._pairs.values():
                if pair.remainder is not None:
                    allocate(pair.master, pair.remainder)
            join([pair.row for pair in self._pairs.values()])
        self._joined = True

    @contextlib.contextmanager
    def materialized(self) -> Iterator[None]:
        """Have the float32 values in the masters inside; write them back at the end.

        For code that reads or writes masters between steps, such as those of `master_of`. Masters
        that are not split always have their values, and are written back. Not to be nested. Methods
        of the optimizer need none of this: they run as if inside.
        """
        self._join()
        before = [pair.written() for pair in self._pairs.values()]
        try:
            yield
        finally:
            if before != [pair.written() for pair in self._pairs.values()]:
                self._rebuilt = False
            self.write_back()

    def _write_back_direct_writes(self) -> None:
        """Round whole masters into their parameters where code outside of the optimizer wrote."""
        if self.split or self._joined:
            return
        for pair in self._pairs.values():
            if pair.master_was_written():
                with torch.no_grad():
                    to_local(pair.parameter).copy_(to_local(pair.master))
                pair.remember()
                self._rebuilt = False

    @torch.no_grad()
    def write_back(self) -> None:
        """Round every master into its parameter, as happens after each step.

        Split masters have something to write in a step and in `materialized` alone.
        """
        if self.split and not self._joined:
            return
        if any(pair.written()[2:] != pair.seen[2:] for pair in self._pairs.values()):
            # The user set the masters, for example to fp32 weights that another library saved.
            self._rebuilt = False
        rows = [pair.row for pair in self._pairs.values()]
        if self.split:
            split(rows)
        elif rows:  # torch refuses an empty list, which a frozen stage has
            torch._foreach_copy_([weight for _, weight, _ in rows], [value for value, *_ in rows])
        self._joined = False
        for pair in self._pairs.values():
            pair.remember()
            if self.split:
                free(pair.master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Set every master to its parameter's value, forgetting what rounding had cut off.

        Seldom needed: a parameter that was written by anything else (a checkpoint that was loaded,
        weights swapped for evaluation) is noticed before the next step, and each element that is no
        longer its master's rounding is taken over. After the first step, of plain tensors (DDP),
        writes through ``.data`` are not noticed, nor are those of a collective, such as
        ``dist.broadcast(parameter, 0)``.
        A split master cannot tell which elements were written: until this is called, each keeps
        its remainder, which is less than the rounding of the weight.
        """
        for pair in self._adopt():
            value, weight, remainder = pair.row
            if remainder is None:
                value.copy_(weight)
            else:
                remainder.zero_()
            pair.remember()

    @torch.no_grad()
    def fp32_value(self, stepped: Tensor) -> Tensor:
        """See `OptimizerView.fp32_value`: of a split master a float32 copy."""
        pair = self._pairs.get(id(stepped))
        if pair is None:
            return stepped.detach()
        pair.catch_up()
        if pair.remainder is None:
            return stepped.detach()
        value = torch.empty_like(pair.parameter.detach(), dtype=torch.float32)
        join([(to_local(value), *pair.row[1:])])
        return value

    # -- state ------------------------------------------------------------------------------------

    def _numbered(self) -> dict[int, Tensor]:
        return {n: m for n, (p, m) in enumerate(self.param_pairs()) if p is not m}

    def state_dict(self) -> dict[str, Any]:
        """Return the masters by the number that ``optimizer.state_dict()`` gives each parameter.

        They are float32, split or not, so either loads the other's. The tensors are the masters
        themselves, as in ``optimizer.state_dict()``; of split masters they are copies.
        """
        return {
            "version": 1,
            "masters": {n: self.fp32_value(m) for n, m in self._numbered().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, exactly, and write the parameters back.

        May come before or after the model's and the optimizer's own ``load_state_dict``.

        Raises:
            ValueError: It is no such state, or has masters of other parameters, or of other
                shapes; nothing is changed then.
        """
        own = self._numbered()
        saved = _read(state_dict, own)
        self.write_back()  # the saved ones may be the masters themselves, loaded in place
        self._join()
        for number, master in own.items():
            master.copy_(saved[number])
        self._rebuilt = False
        self.write_back()

    def _warn_if_resumed(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of masters made from rounded weights, if the optimizer's state has steps already."""
        pairs = [pair for pair in self._pairs.values() if not pair.master_was_written()]
        resumed = [pair for pair in pairs if _has_steps(optimizer.state.get(pair.master, {}))]
        if not resumed:
            return
        dtype = resumed[0].parameter.dtype
        plural = "" if len(resumed) == 1 else "s"
        warnings.warn(
            f"{type(optimizer).__name__} has the state of earlier steps, and the fp32 masters of "
            f"{len(resumed)} parameter{plural} were rebuilt from {dtype} weights, because no "
            "masters were loaded before this step. The run goes on without the digits that "
            f"rounding cut off, up to 1 part in {2 / torch.finfo(dtype).eps:,.0f} of each weight. "
            "Save amp.state_dict(), or masters.state_dict(), with the states of the model and the "
            "optimizer, and load it before the first step. To go on from a level without masters, "
            "use amp.flat_state_dict()",
            stacklevel=stacklevel_of_caller("torch."),
        )


def masters_of(optimizer: torch.optim.Optimizer) -> MasterParameters | None:
    """Return the master parameters of an optimizer, or of the one it wraps; None without any."""
    source = view_of(optimizer)
    return source if isinstance(source, MasterParameters) else None


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer steps on this rank: masters, and parameters that have none.

    As ``apex.amp.master_params``: what to clip by hand, after ``scaler.unscale_(optimizer)``.
    """
    for _, stepped in view_of(optimizer).param_pairs():
        yield stepped


def _refuse(optimizer: torch.optim.Optimizer, split: bool, allow_empty: bool) -> None:
    """Refuse an optimizer that can have no masters, before it is changed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}; make one "
            "MasterParameters for each optimizer"
        )
    name = type(optimizer).__name__
    if masters_of(optimizer) is not None:
        raise ValueError(
            f"this {name} has master parameters already: masters_of(optimizer) returns them"
        )
    refuse_share(optimizer)
    refuse_held(optimizer)
    parameters = params_of(optimizer)
    for parameter in parameters:
        _refuse_flat(parameter)
    if split:
        _refuse_split(name, parameters)
    if not allow_empty and not any(parameter.dtype in _LOW for parameter in parameters):
        raise ValueError(
            f"{name} holds no float16 or bfloat16 parameter, so there is nothing to make masters "
            "of. The order is: cast the model (model.half()), wrap it (DDP), make the optimizer "
            "over the wrapped model's parameters, then MasterParameters(optimizer)"
        )
    for parameter, state in optimizer.state.items():
        _refuse_rounded(name, parameter, state)


def _refuse_split(name: str, parameters: Iterable[Tensor]) -> None:
    if any(parameter.dtype is torch.float16 for parameter in parameters):
        raise ConfigError(
            f"{name} holds float16 parameters, and a float32 value is a bfloat16 one and 16 bits, "
            "not a float16 one: take bf16-O2, or whole masters (split=False)"
        )


def _refuse_rounded(name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
    rounded = [key for key, value in state.items() if _was_used(value)]
    if rounded:
        raise ConfigError(
            f"{name} has its state ({', '.join(rounded)}) in {parameter.dtype}, where small "
            "second moments are zero: its load_state_dict rounds to the dtype of the "
            "parameters. Make the masters first (initialize, or MasterParameters), of all that is "
            "to be trained (requires_grad), then load"
        )


def refuse_share(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps this rank's share of the parameters (ZeRO, OSS).

    Raises:
        ConfigError: It does.
    """
    if zero_local_optimizer(optimizer) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} steps a share of the parameters on each rank, and hands "
            "the others what it stepped, not what a master rounds to. Take fp16, which needs no "
            "masters, or fully_shard in its place, over a model that was cast, or over a float32 "
            "one with its own MixedPrecisionPolicy"
        )


def refuse_held(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds its parameters outside of its groups too, as LBFGS does.

    Raises:
        ConfigError: It does.
    """
    parameters = set(map(id, params_of(optimizer)))
    for name, value in vars(optimizer).items():
        held = () if name in ("param_groups", "state") else map(id, tree_leaves(value))
        if not parameters.isdisjoint(held):
            raise ConfigError(
                f"{type(optimizer).__name__} holds its parameters in {name!r} as well, where "
                "masters cannot take their place: its steps would change nothing. Take fp16 or "
                "bf16, which need no masters; for LBFGS fp32, and its own step(closure)"
            )


def _is_low(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype in _LOW


def _has_steps(state: Mapping[str, Any]) -> bool:
    """Return whether the state of one parameter is from a step, and not only initialised."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, Tensor) for value in state.values())


def _was_used(state: Any) -> bool:
    """Return whether it is in half precision and not constant, as Adagrad's is at first."""
    return _is_low(state) and state.numel() > 0 and bool(state.min() < state.max())


def _refuse_flat(parameter: Tensor) -> None:
    flat = hasattr(parameter, "_fsdp_flattened") or type(parameter).__name__ == "FlatParameter"
    if parameter.dtype in _LOW and flat:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is flat (FullyShardedDataParallel), "
            "which changes what it holds between passes. Leave the model in float32 and pass "
            "mixed_precision=MixedPrecision(param_dtype=torch.float16): its own float32 parameters "
            "are the masters then. Or take fully_shard, whose parameters stay in place"
        )


def _read(state: Any, own: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Return the saved masters, once all of them are known to fit."""
    saved = state.get("masters") if isinstance(state, Mapping) else None
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or type(version) is not int or version != 1:
        raise ValueError(
            "this is not a state of master parameters, the dict with 'version': 1 and 'masters' "
            f"that masters.state_dict() returns: {state!r:.80}"
        )
    for number in sorted(saved.keys() ^ own.keys(), key=str):
        there = "let it require gradients, load, and freeze it then"
        here = "freeze it before masters are made, load, and thaw it then"
        raise ValueError(
            f"the state has {len(saved)} masters and there are {len(own)} here; parameter {number} "
            f"of the optimizer has one on one side alone: {there if number in saved else here}, or "
            "take the same model and optimizer"
        )
    for number, master in own.items():
        value = saved[number]
        real = isinstance(value, Tensor) and not value.is_complex()
        if not real or value.shape != master.shape or is_dtensor(value) != is_dtensor(master):
            raise ValueError(
                f"the saved master of parameter {number} is {_described(value)}, and the one here "
                f"{_described(master)}; torch.distributed.checkpoint loads a state of another "
                "layout into masters.state_dict()"
            )
    return saved


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
