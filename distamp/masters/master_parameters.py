"""MasterParameters: fp32 copies that an optimizer steps instead of half-precision parameters."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distamp.callers import stacklevel_of_caller
from distamp.error_text import count_text
from distamp.errors import CallOrderError, ConfigError
from distamp.fsdp_params import check_reduction_finished
from distamp.grads import (
    LocalGrads,
    check_no_fp16,
    local_grads,
    multiply_,
    to_local,
    unscale_group_,
)
from distamp.masters.cast_grads import cast_grads_
from distamp.masters.master_pair import MasterPair
from distamp.masters.masters_state_dict import parse_masters_state_dict
from distamp.masters.optimizer_checks import (
    check_not_flat_param,
    check_split_dtype,
    check_state_dtype,
    check_supported,
    is_half,
)
from distamp.masters.placeholder import allocate_values, release_values
from distamp.masters.split_tensors import join_fp32, split_fp32
from distamp.optim_utils import (
    OptimizerView,
    find_closure,
    is_nested_step,
    methods_beyond_torch,
    params_of,
    set_view,
    view_of,
)

__all__ = ["MasterParameters", "master_params", "masters_of"]

_version_of = operator.attrgetter("_version")


class MasterParameters(OptimizerView):
    """fp32 copies of an optimizer's fp16 and bf16 parameters, which it steps instead of these.

    Differs from ``apex.amp`` in that the masters are in the optimizer's ``param_groups``, and two
    of torch's hooks around ``step`` cast the gradients and write the parameters back.
    ``optimizer.zero_grad`` is wrapped on the optimizer, as torch's learning-rate schedulers wrap
    ``step``, and clears the model's gradients too. Float32 state of the optimizer moves to the
    masters. Parameters of other dtypes (a batch norm in float32) do not change. A frozen parameter
    gets a master in the first step after it begins to require gradients.

    Masters are elementwise copies of this rank's parameters. The master of a DTensor (FSDP2, HSDP,
    tensor parallel) is a DTensor with the same placements.

    With ``split=True`` a master consists of its bfloat16 parameter and a 16-bit remainder, without
    any loss, so it takes 2 bytes an element instead of 4. The float32 values exist only inside
    ``optimizer.step()`` and `materialized`. Between steps the masters in ``param_groups`` read as
    NaN. Parameters are then rounded half away from zero, and not to nearest even.

    Create it once, after you cast and wrap the model and create the optimizer. With
    `DistGradScaler`, ``fp16_grads="master"`` unscales in float32 into the masters. Without a scaler
    the gradients are used unchanged. In both cases the cast frees the model's own gradients, so no
    gradient is counted twice.

    Args:
        optimizer: Has float16 or bfloat16 parameters, and may have state already.
        split: Whether masters are stored as bfloat16 parameters and remainders.
        allow_empty: Whether the optimizer may have no float16 or bfloat16 parameter yet, because
            ``add_param_group`` adds the first one later.

    Attributes:
        split: The argument of that name.

    Raises:
        TypeError: ``optimizer`` is no optimizer.
        ValueError: No parameter needs a master and ``allow_empty`` is False, or the optimizer has
            masters already. Also if the optimizer steps flat parameters (FSDP1) or a share of the
            parameters (ZeroRedundancyOptimizer, OSS), if its state is in half precision because it
            was loaded too early, and if a parameter to split is float16.

    Example::

        model = model.half()
        optimizer = torch.optim.AdamW(model.parameters())
        masters = MasterParameters(optimizer)
        scaler = DistGradScaler("cuda", fp16_grads="master")

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    """

    has_masters = True

    # Private attributes that survive a call:
    # _optimizer_ref: weak, because the optimizer owns this object.
    # _pairs: by id(master). The pairs own the parameters, because the optimizer has only masters.
    # _values_exist: masters have their values, and the code that materialized them writes the
    #     parameters back. True inside a step, a method of the optimizer, or `materialized`.
    # _in_optimizer_method: `_run_method` is calling a method of the optimizer.
    # _has_initial_values: all masters were created from weights, and no step, load or write has
    #     changed them since.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        split: bool = False,
        allow_empty: bool = False,
    ) -> None:
        check_supported(optimizer, split, allow_empty)
        self.split = split
        self._optimizer_ref = weakref.ref(optimizer)
        self._pairs: dict[int, MasterPair] = {}
        self._values_exist = False
        self._in_optimizer_method = False
        self._has_initial_values = True
        self._add_missing_masters()
        optimizer.register_step_pre_hook(self._pre_step_hook)
        optimizer.register_step_post_hook(self._post_step_hook)
        # torch would round the state of a parameter without a master to half precision.
        optimizer.register_load_state_dict_pre_hook(self._pre_load_hook)
        optimizer.zero_grad = self._wrap_zero_grad(optimizer)  # type: ignore[method-assign]
        optimizer.__getstate__ = self.__getstate__  # type: ignore[method-assign]
        for name, method in methods_beyond_torch(type(optimizer)):
            setattr(optimizer, name, self._wrap_method(method))
        set_view(optimizer, self)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy or a pickle, also of the optimizer: its masters would have no model."""
        raise CallOrderError(
            "Master parameters, and an optimizer that has them, cannot be copied or pickled, "
            "because the copy would have no model. Copy the model, create an optimizer and "
            "MasterParameters(optimizer) for the copy (initialize does that), and load their "
            "state_dict()."
        )

    # -- pairs of parameters and masters ----------------------------------------------------------

    def _optimizer_or_raise(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        if optimizer is None:
            raise CallOrderError(
                "The optimizer of these master parameters is gone. They hold only a weak reference "
                "to it, so keep a reference to the optimizer."
            )
        return optimizer

    def _add_missing_masters(self) -> list[MasterPair]:
        """Create masters for new and thawed parameters; return all pairs in the groups' order."""
        optimizer = self._optimizer_or_raise()
        pairs: list[MasterPair] = []
        for group in optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                pair = self._pairs.get(id(param))
                if pair is None and param.requires_grad and is_half(param):
                    pair = self._create_master(param, optimizer)
                    params[index] = pair.master
                if pair is not None:
                    pairs.append(pair)
        return pairs

    @torch.no_grad()
    def _create_master(self, param: Tensor, optimizer: torch.optim.Optimizer) -> MasterPair:
        """Create the master of a parameter, and move the optimizer's state to it."""
        optimizer_name = type(optimizer).__name__
        check_not_flat_param(param)
        check_state_dtype(optimizer_name, param, optimizer.state.get(param, {}))
        if any(pair.param is param for pair in self._pairs.values()):
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} was added to {optimizer_name}, which "
                "has a master of it already. Two masters of a parameter would diverge, so pass "
                "each parameter to the optimizer only once."
            )
        # A master is no nn.Parameter, because to_local() of a DTensor that is an nn.Parameter
        # returns a view, and not the tensor that the DTensor holds.
        pair = MasterPair(param, param.detach().float().requires_grad_())
        pair.param_versions, pair.master_versions = pair.current_versions()
        if self.split:
            check_split_dtype(optimizer_name, [param])
            pair.remainder = torch.zeros_like(to_local(param), dtype=torch.int16)
            if not self._values_exist:
                release_values(pair.master)
        self._pairs[id(pair.master)] = pair
        if param in optimizer.state:
            state = optimizer.state.pop(param)
            fp32_state = {}
            for key, value in state.items():
                fp32_state[key] = value.float() if is_half(value) else value
            optimizer.state[pair.master] = fp32_state
        return pair

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model with its master, in the optimizer's order."""
        for pair in self._add_missing_masters():
            yield pair.param, pair.master

    def master_of(self, parameter: Tensor) -> Tensor | None:
        """Return the master of a parameter of the model; None if it has none."""
        for param, master in self.pairs():
            if param is parameter:
                return master
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the masters between steps on this rank, in addition to the parameters."""
        return sum(pair.nbytes for pair in self._pairs.values())

    # -- the view of a step -----------------------------------------------------------------------

    @property
    def holder(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """See `OptimizerView`: the optimizer, which no wrapper with shares has."""
        return self._optimizer_or_raise()

    @property
    def base(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """See `OptimizerView`: the optimizer."""
        return self._optimizer_or_raise()

    def model_params(self) -> list[Tensor]:
        """See `OptimizerView.model_params`: the parameters of the model, and not the masters."""
        return [param for param, _ in self.param_pairs()]

    def param_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See `OptimizerView.param_pairs`: masters, and parameters without a master."""
        param_by_master = {id(master): param for param, master in self.pairs()}
        pairs: list[tuple[Tensor, Tensor]] = []
        for stepped in params_of(self._optimizer_or_raise()):
            param = param_by_master.get(id(stepped), stepped)
            pairs.append((param, stepped))
        return pairs

    def has_grads(self) -> bool:
        """See `OptimizerView.has_grads`."""
        for param, stepped in self.param_pairs():
            if param.grad is not None or stepped.grad is not None:
                return True
        return False

    def measured_grads(self) -> LocalGrads:
        """See `OptimizerView.measured_grads`: gradients of masters, with the model's parameters."""
        params: list[Tensor] = []
        stepped_params: list[Tensor] = []
        for param, stepped in self.param_pairs():
            if stepped.grad is not None:
                params.append(param)
                stepped_params.append(stepped)
        grads = local_grads(stepped_params)
        return LocalGrads(params, grads.grads, grads.values, grads.are_plain)

    def multiply_grads_(self, factor: Tensor) -> None:
        """See `OptimizerView.multiply_grads_`: gradients of the model and of its masters."""
        params = self.model_params()
        params += [stepped for param, stepped in self.param_pairs() if param is not stepped]
        multiply_(local_grads(params).values, factor)

    @torch.no_grad()
    def unscale(
        self, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Move the model's gradients to the masters, times ``inv_scale``, and free the model's.

        Gradients that masters had are overwritten. The master of a parameter without a gradient
        has no gradient afterwards. The scaler calls this, and ``optimizer.step()`` casts the
        gradients if the scaler has not.

        Raises:
            CallOrderError: FSDP2 has not finished the reduction of a gradient.
            ConfigError: The model was moved to another device than its masters.
            ValueError: A frozen parameter, which has no master, has a float16 gradient.
        """
        check_reduction_finished(self.model_params())
        params = [param for param, stepped in self.param_pairs() if param is stepped]
        grads_without_master = local_grads(params).values
        check_no_fp16([grad.dtype for grad in grads_without_master])
        flags: dict[torch.device, Tensor] = {}
        # No function here writes to a placeholder, so the check of each call is skipped.
        with torch._C.DisableTorchFunctionSubclass():
            pairs = self._pairs_with_grads()
            for _, master in self.pairs():
                master.grad = None
            for master_grads in self._cast_grads(pairs):
                unscale_group_(master_grads, inv_scale, found_inf, flags)
            for grad in grads_without_master:
                unscale_group_([grad], inv_scale, found_inf, flags)
        return flags

    def master_tensors(self, stepped: Tensor) -> list[tuple[str, Tensor]]:
        """See `OptimizerView.master_tensors`: a whole master, or the remainder of a split one."""
        pair = self._pairs.get(id(stepped))
        if pair is None:
            return []
        if pair.remainder is None:
            return [("master", pair.master)]
        return [("remainder", pair.remainder)]

    @torch.no_grad()
    def fp32_value(self, stepped: Tensor) -> Tensor:
        """See `OptimizerView.fp32_value`: the values of a split master are a float32 copy."""
        pair = self._pairs.get(id(stepped))
        if pair is None:
            return stepped.detach()
        pair.pull_external_writes()
        if pair.remainder is None:
            return stepped.detach()
        value = torch.empty_like(pair.param.detach(), dtype=torch.float32)
        join_fp32([(to_local(value), to_local(pair.param), pair.remainder)])
        return value

    # -- gradients --------------------------------------------------------------------------------

    def _pairs_with_grads(self) -> list[MasterPair]:
        """Return the pairs whose parameters have gradients.

        Raises:
            ConfigError: A gradient is on another device than its master.
        """
        pairs = [pair for pair in self._add_missing_masters() if pair.param.grad is not None]
        for pair in pairs:
            if pair.param.device != pair.master.device:
                raise ConfigError(
                    f"The model has gradients on {pair.param.device}, but its masters are on "
                    f"{pair.master.device}. The model was moved after MasterParameters was "
                    "created. Move the model first, then create the optimizer and its masters, and "
                    "load their state_dicts."
                )
        return pairs

    def _cast_grads(self, pairs: list[MasterPair]) -> Iterator[list[Tensor]]:
        """Move gradients from parameters to masters; yield them as `cast_grads_` does."""
        for pair in pairs:
            grad = pair.param.grad
            pair.grad_freed = grad is not None and not grad.is_sparse
        return cast_grads_((pair.param, pair.master) for pair in pairs)

    @contextlib.contextmanager
    def _lend_grads(self) -> Iterator[None]:
        """Give masters the gradients of the model, scaled or not, for one method call.

        The model keeps its gradients, because the step follows later. In-place writes of the method
        to a gradient are copied to the model's gradient.
        """
        lent_grads: list[tuple[MasterPair, Tensor, int]] = []
        for pair in self._pairs_with_grads():
            if pair.master.grad is None and pair.param.grad is not None:
                grad = pair.param.grad.float()
                if grad.is_sparse:
                    grad = grad.coalesce()
                pair.master.grad = grad
                lent_grads.append((pair, grad, _version_of(to_local(grad))))
        try:
            yield
        finally:
            for pair, grad, version in lent_grads:
                if pair.master.grad is not grad:
                    continue
                pair.master.grad = None
                was_written = _version_of(to_local(grad)) != version
                if was_written and pair.param.grad is not None:
                    pair.param.grad.copy_(grad)

    def _wrap_zero_grad(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return an ``optimizer.zero_grad`` that clears the model's gradients too."""
        # Other code may have wrapped the method on the optimizer, in the same way as here.
        instance_zero_grad = vars(optimizer).get("zero_grad")

        def zero_grad(set_to_none: bool = True) -> None:
            optimizer = self._optimizer_or_raise()
            # No function here writes to a placeholder, so the check of each call is skipped.
            with torch._C.DisableTorchFunctionSubclass():
                if instance_zero_grad:
                    instance_zero_grad(set_to_none)
                else:
                    type(optimizer).zero_grad(optimizer, set_to_none)
                for pair in self._add_missing_masters():
                    pair.zero_grad(set_to_none)
            self._write_back_external_writes()

        return zero_grad

    # -- other methods of the optimizer ------------------------------------------------------------

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the optimizer's class that changes the model, as its step does."""

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # The class's function takes the optimizer, which this object references weakly.
            bound_method = functools.partial(method, self._optimizer_or_raise())
            return self._run_method(bound_method, args, kwargs)

        return wrapped

    def _run_method(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method over values and gradients of the masters, and write the parameters back."""
        if self._values_exist:
            # The step, method or `materialized` around this call writes the parameters back.
            return method(*args, **kwargs)
        with torch.no_grad():
            self._materialize()
        self._in_optimizer_method = True
        try:
            with self._lend_grads():
                return method(*args, **kwargs)
        finally:
            self._in_optimizer_method = False
            self.write_back()

    # -- hooks of the optimizer's step ------------------------------------------------------------

    @torch.no_grad()
    def _pre_step_hook(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_nested_step(optimizer) or self._in_optimizer_method:
            return
        if find_closure(args[1:], kwargs) is not None:
            raise CallOrderError(
                "step() received a closure, whose gradients would not reach the masters. Call "
                "backward() before step(), or train in float32 with an optimizer that needs a "
                "closure (LBFGS)."
            )
        # Without a scaler the model has all gradients. After a scaler it has only those gradients
        # that the user added after unscale_, which torch would add to the unscaled gradients.
        pairs = self._pairs_with_grads()
        unscaled_grads = [pair.master.grad for pair in pairs]
        for _ in self._cast_grads(pairs):
            pass
        for pair, unscaled_grad in zip(pairs, unscaled_grads, strict=True):
            master = pair.master
            if unscaled_grad is not None and master.grad is not None:
                master.grad = unscaled_grad + master.grad
        if self._has_initial_values:
            self._warn_if_resumed(optimizer)
        self._has_initial_values = False
        self._materialize()

    def _post_step_hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_nested_step(optimizer) or self._in_optimizer_method:
            return
        self.write_back()
        # A loop may call only model.zero_grad(), which does not reach the masters.
        for pair in self._pairs.values():
            pair.master.grad = None

    def _pre_load_hook(self, *_: Any) -> None:
        self._add_missing_masters()

    def _warn_if_resumed(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of masters from rounded weights if the optimizer has the state of earlier steps."""
        resumed: list[MasterPair] = []
        for pair in self._pairs.values():
            state = optimizer.state.get(pair.master, {})
            if not pair.only_master_was_written() and _has_steps(state):
                resumed.append(pair)
        if not resumed:
            return
        dtype = resumed[0].param.dtype
        inverse_loss = 2 / torch.finfo(dtype).eps
        warnings.warn(
            f"{type(optimizer).__name__} has the state of earlier steps, but the fp32 masters of "
            f"{count_text(len(resumed), 'parameter')} were rebuilt from {dtype} weights, because "
            "no masters were loaded before this step. Training continues without the digits that "
            f"rounding cut off, up to 1 part in {inverse_loss:,.0f} of each weight. Save "
            "amp.state_dict(), or masters.state_dict(), with the states of the model and the "
            "optimizer, and load it before the first step. To continue from a level without "
            "masters, use amp.flat_state_dict().",
            stacklevel=stacklevel_of_caller("torch."),
        )

    # -- values of masters and parameters ---------------------------------------------------------

    @torch.no_grad()
    def _materialize(self) -> None:
        """Copy external writes to the masters, and create the values of split masters."""
        self._add_missing_masters()
        pairs = self._pairs.values()
        for pair in pairs:
            pair.pull_external_writes()
        if self.split:
            for pair in pairs:
                if pair.remainder is not None:
                    allocate_values(pair.master, pair.remainder)
            join_fp32([pair.split_tensors for pair in pairs])
        self._values_exist = True

    @contextlib.contextmanager
    def materialized(self) -> Iterator[None]:
        """Let masters have their float32 values inside, and write the parameters back at the end.

        Use it for code that reads or writes masters between steps, for example the masters that
        `master_of` returns. Whole masters always have their values, and are written back too. Do
        not nest it. Methods of the optimizer do not need it, because they run as if inside.
        """
        self._materialize()
        versions = [pair.current_versions() for pair in self._pairs.values()]
        try:
            yield
        finally:
            if versions != [pair.current_versions() for pair in self._pairs.values()]:
                self._has_initial_values = False
            self.write_back()

    def _write_back_external_writes(self) -> None:
        """Round whole masters into their parameters if other code than the optimizer wrote them."""
        if self.split or self._values_exist:
            return
        for pair in self._pairs.values():
            if pair.only_master_was_written():
                with torch.no_grad():
                    to_local(pair.param).copy_(to_local(pair.master))
                pair.save_versions()
                self._has_initial_values = False

    @torch.no_grad()
    def write_back(self) -> None:
        """Round every master into its parameter, as each step does.

        Split masters have values to write only in a step and in `materialized`.
        """
        if self.split and not self._values_exist:
            return
        pairs = self._pairs.values()
        if any(pair.master_was_written() for pair in pairs):
            # A user may set the masters, for example to fp32 weights that another library saved.
            self._has_initial_values = False
        if self.split:
            split_fp32([pair.split_tensors for pair in pairs])
        elif pairs:  # torch refuses an empty list, and a frozen stage has no pairs
            params = [to_local(pair.param) for pair in pairs]
            masters = [to_local(pair.master) for pair in pairs]
            torch._foreach_copy_(params, masters)
        self._values_exist = False
        for pair in pairs:
            pair.save_versions()
            if self.split:
                release_values(pair.master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Set every master to its parameter's value, without the bits that rounding cut off.

        This is seldom needed. The next step detects writes to a parameter (a checkpoint that was
        loaded, weights swapped for evaluation), and copies each element that is not its rounded
        master any more to the master. After the first step, writes to plain tensors (DDP) through
        ``.data`` are not detected, and neither are those by a collective, for example
        ``dist.broadcast(parameter, 0)``.
        The written elements of a split master are unknown. Until this call each element keeps its
        remainder, which is smaller than the rounding of the weight.
        """
        for pair in self._add_missing_masters():
            pair.reset_master()

    # -- state ------------------------------------------------------------------------------------

    def _masters_by_index(self) -> dict[int, Tensor]:
        """Return the masters by the index of their parameter in ``optimizer.state_dict()``."""
        masters: dict[int, Tensor] = {}
        for index, (param, stepped) in enumerate(self.param_pairs()):
            if stepped is not param:
                masters[index] = stepped
        return masters

    def state_dict(self) -> dict[str, Any]:
        """Return the masters by the index of their parameter in ``optimizer.state_dict()``.

        Values are float32, so whole masters can load the state of split masters and vice versa. As
        in ``optimizer.state_dict()``, the tensors are the masters themselves. Those of split
        masters are copies.
        """
        values = {
            index: self.fp32_value(master) for index, master in self._masters_by_index().items()
        }
        return {"version": 1, "masters": values}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the masters of a `state_dict` exactly, and write the parameters back.

        Call it before or after the model's and the optimizer's own ``load_state_dict``.

        Raises:
            ValueError: ``state_dict`` is no such state, or has masters of other parameters or of
                other shapes. No master has changed then.
        """
        masters = self._masters_by_index()
        saved = parse_masters_state_dict(state_dict, masters)
        # The saved tensors may be the masters themselves, into which a checkpoint was loaded.
        self.write_back()
        self._materialize()
        for index, master in masters.items():
            master.copy_(saved[index])
        self._has_initial_values = False
        self.write_back()

    # -- snapshots --------------------------------------------------------------------------------

    @torch.no_grad()
    def take_over_writes(self) -> None:
        """See `OptimizerView.take_over_writes`."""
        for pair in self._add_missing_masters():
            was_compared = pair.was_compared
            pair.pull_external_writes()
            # The first step still compares the values, because version counters miss some writes.
            pair.was_compared = was_compared
        self._write_back_external_writes()

    def snapshot_state(self) -> dict[str, Any]:
        """See `OptimizerView.snapshot_state`: masters or remainders, by ``id`` of parameters."""
        values: dict[int, Tensor] = {}
        was_compared: dict[int, bool] = {}
        with torch.no_grad():
            for pair in self._add_missing_masters():
                values[id(pair.param)] = pair.stored_values
                was_compared[id(pair.param)] = pair.was_compared
        return {
            "values": values,
            "was_compared": was_compared,
            "has_initial_values": self._has_initial_values,
        }

    @torch.no_grad()
    def load_snapshot_state(self, state: dict[str, Any]) -> None:
        """See `OptimizerView.load_snapshot_state`.

        The master of a parameter that was frozen in the snapshot is made from the parameter, as its
        first step does.
        """
        for pair in self._add_missing_masters():
            values = state["values"].get(id(pair.param))
            if values is None:
                pair.reset_master()
            elif values is not pair.stored_values:
                pair.stored_values.copy_(values)
            pair.save_versions()
            pair.was_compared = state["was_compared"].get(id(pair.param), False)
            pair.zero_grad(set_to_none=True)
            if self._values_exist and pair.remainder is not None:
                # A step that raised has left the values.
                release_values(pair.master)
        self._values_exist = self._in_optimizer_method = False
        self._has_initial_values = state["has_initial_values"]


def masters_of(optimizer: torch.optim.Optimizer) -> MasterParameters | None:
    """Return the masters of an optimizer, which may be wrapped; None if it has none."""
    view = view_of(optimizer)
    return view if isinstance(view, MasterParameters) else None


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer steps on this rank: masters, and other parameters.

    As with ``apex.amp.master_params``, pass them to a clipping function after
    ``scaler.unscale_(optimizer)``.
    """
    for _, stepped in view_of(optimizer).param_pairs():
        yield stepped


def _has_steps(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state is from a step, and not only initialised."""
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, Tensor) for value in state.values())
