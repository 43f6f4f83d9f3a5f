"""Entropy-SGD: gradient descent on the local entropy, as a torch optimizer (Algorithm 1, Eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.kernels.entropy_sgd import KernelLists, Rule
from wideflat.kernels.flat_blocks import FlatBlocks, cache_blocks
from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.noise import GaussianNoise

__all__ = ["EntropySGD"]

#: Entries of an inner optimizer's state that are a velocity of w', which stops when w' is put back on w.
VELOCITIES = ("momentum_buffer", "exp_avg")

#: Devices with a fused kernel of the SGD step; elsewhere it is a chain of foreach kernels.
FUSED = ("cpu", "cuda", "mps")


class EntropySGD(Optimizer):
    r"""Entropy-SGD (Algorithm 1): an explorer w' wanders around w for L mini-batches, then w moves after it.

    .. code-block:: text

        for t = 1, 2, ...
            w', mu <- w
            for l = 1, ..., L                                     each is one call of step(), on one mini-batch
                dw' <- grad Loss(w') + gamma (w' - w)
                w'  <- w' - eta' dw' + sqrt(eta') epsilon N(0, I)
                mu  <- alpha mu + (1 - alpha) w'
            w <- w - eta (w - mu)                                 within the L-th call

    The model holds w', on which gradients are taken; the optimizer holds w. The gradient of the local entropy is
    gamma (w - <w'>) (Eq. 5), with mu for the mean <w'> and gamma absorbed in eta, as in the paper.

    ``lr`` is the outer rate eta, so every scheduler of torch drives the outer step. All arguments live in the param
    groups and are read from there at every call: change ``group["gamma"]`` by hand or with `wideflat.Focusing`.

    Notes on the paper:
        - Weight decay and momentum are used in both loops (App. C). In the inner loop: gradient + gamma (w' - w) +
          weight decay, then momentum, then the step, then the noise. Inner momentum is zero when a cycle starts; outer
          momentum lives on. In the outer loop the same with (w - mu) as the gradient.
        - The coupling pulls w' towards w, as Algorithm 1 prints it (the text of Sec. 4 has the opposite sign).
        - mu keeps the weight ``alpha`` and the noise is sqrt(eta') epsilon, both as printed. Other implementations use
          1 - alpha, and a factor sqrt(2) in the noise.
        - w' is put back on w at the end of the L-th call, so at a multiple of L calls the model holds w.

    Args:
        params: Parameters, or groups of them, as for any torch optimizer.
        lr: Outer learning rate eta.
        inner_lr: Inner learning rate eta'. It is not driven by schedulers.
        inner_steps: L, the mini-batches in a cycle; the same in all groups.
        gamma: Strength of the pull towards w.
        epsilon: Size of the Langevin noise.
        alpha: Weight of the past in the running mean mu; 0 keeps the last w' alone.
        momentum: Momentum of both loops.
        nesterov: Nesterov momentum in both loops.
        weight_decay: Weight decay of both loops.
        outer_momentum: Momentum of the outer loop, where it is to differ; None means ``momentum``.
        outer_nesterov: The same for ``nesterov``.
        outer_weight_decay: The same for ``weight_decay``.
        inner: Another optimizer for the inner step: anything that makes one out of params and ``lr``, for example
            ``functools.partial(torch.optim.RMSprop, momentum=0.9)``. It gets the gradient + gamma (w' - w), its ``lr``
            is set to ``inner_lr`` before each step, and its state is saved with this one's. ``momentum``, ``nesterov``
            and ``weight_decay`` then concern the outer loop alone: give the inner ones to the factory. When a cycle
            starts its velocity (``momentum_buffer``, ``exp_avg``) is zeroed, since w' was moved; what it learnt about
            the scale of the gradients is kept, since that is a matter of the landscape around w and takes longer than
            L steps to learn.
        seed: Seed of the noise, which is a function of (seed, step, parameter): the same on every data-parallel rank
            and after a resume.
        fused: Work in a compiled kernel, one pass over memory a step: for parameters on the CPU, where there is a C
            compiler (`wideflat.kernels.library`). None does so where it can be done; True raises an error where not;
            False uses torch's operations. The noise is the same, the rest equal up to rounding.

    Example:
        On the loss w^2/2 from w = 1, with L = 2, eta' = 0.5, gamma = 1 and alpha = 0.5, w' is 0.5 and then
        0.5 - 0.5 (0.5 - 0.5) = 0.5; mu is 0.75 and then 0.625; w ends at 1 - 0.8 (1 - 0.625) = 0.7:

        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> opt = EntropySGD([w], lr=0.8, inner_lr=0.5, inner_steps=2, gamma=1.0, epsilon=0.0, alpha=0.5)
        >>> for _ in range(2):
        ...     opt.zero_grad()
        ...     (w**2 / 2).backward()
        ...     _ = opt.step()
        >>> round(w.item(), 6), opt.at_center
        (0.7, True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.5,
        inner_lr: float = 0.02,
        inner_steps: int = 5,
        gamma: float = 0.5,
        epsilon: float = 1e-4,
        alpha: float = 0.75,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        outer_momentum: float | None = None,
        outer_nesterov: bool | None = None,
        outer_weight_decay: float | None = None,
        inner: Callable[..., Optimizer] | None = None,
        seed: int = 0,
        fused: bool | None = None,
    ) -> None:
        self._fused = fused
        self._kernels: dict[tuple[str, int], KernelLists] = {}
        self._inner: Optimizer | None = None
        self._swapped = False
        self._noise: GaussianNoise | None = None
        self._blocks: dict[tuple[str, int], FlatBlocks] = {}
        defaults = {
            "lr": lr,
            "inner_lr": inner_lr,
            "inner_steps": inner_steps,
            "gamma": gamma,
            "epsilon": epsilon,
            "alpha": alpha,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "outer_momentum": outer_momentum,
            "outer_nesterov": outer_nesterov,
            "outer_weight_decay": outer_weight_decay,
            "seed": seed,
        }
        super().__init__(params, defaults)
        if inner is not None:
            # Our groups carry names that another optimizer does not know; it is given the parameters alone.
            groups = [{"params": group["params"], "lr": group["inner_lr"]} for group in self.param_groups]
            self._inner = inner(groups, lr=inner_lr)

    # ------------------------------------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; in the middle of a cycle it joins in with w' = w."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
            for p in group["params"]:
                if p.is_complex():
                    raise ValueError(
                        f"EntropySGD does not support complex parameters (one of shape {tuple(p.shape)}); "
                        "store the real and imaginary parts, see torch.view_as_real"
                    )
            if group["inner_steps"] != self.param_groups[0]["inner_steps"]:
                raise ValueError(
                    "inner_steps must be the same in all param groups, which go through the cycle together; "
                    f"got {group['inner_steps']} beside {self.param_groups[0]['inner_steps']}"
                )
        except ValueError:
            self.param_groups.pop()
            raise
        # The counters are the same in every group; a group cannot bring its own.
        group["step"] = self.param_groups[0].get("step", 0)
        group["position"] = self.param_groups[0].get("position", 0)
        for p in group["params"]:
            if p.requires_grad:
                self._allocate(p, group)
        if self._inner is not None:
            self._inner.add_param_group({"params": group["params"], "lr": group["inner_lr"]})

    def _allocate(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of one parameter: w, mu and the velocities of both loops, at w' = w and at rest."""
        state: dict[str, Tensor] = self.state[p]
        for name in ("center", "mean"):
            state[name] = p.detach().clone(memory_format=torch.preserve_format)
        if group["momentum"] and self._inner is None:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if _outer(group, "momentum"):
            state["outer_momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @staticmethod
    def _buffer(p: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
        """The state ``name`` of a parameter, made of zeros if a momentum was switched on only now."""
        if name not in state:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner, "_swapped": self._swapped, "_fused": self._fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_inner", None)
        self.__dict__.setdefault("_swapped", False)
        self.__dict__.setdefault("_fused", None)
        self._noise, self._blocks, self._kernels = None, {}, {}  # working memory, made anew

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer; also right in the middle of a cycle, but not within `center`."""
        self._refuse_at_center("state_dict()")
        self._publish_inner_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any optimizer. Load the model's own state too: the model holds w', the optimizer w."""
        self._refuse_at_center("load_state_dict()")
        super().load_state_dict(state_dict)
        if self._inner is not None:
            self._adopt_inner_state(state_dict)

    def _publish_inner_state(self) -> None:
        """Show the inner optimizer's state (the same tensors) among this one's, as ``inner_<name>``."""
        if self._inner is not None:
            for p, state in self._inner.state.items():
                self.state[p].update({f"inner_{name}": value for name, value in state.items()})

    def _adopt_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Hand ``inner_<name>`` to the inner optimizer's own loader, which knows what must keep its type."""
        assert self._inner is not None
        saved = {
            key: {name[6:]: value for name, value in state.items() if name.startswith("inner_")}
            for key, state in state_dict["state"].items()
        }
        own = self._inner.state_dict()
        own["state"] = {key: state for key, state in saved.items() if state}
        self._inner.load_state_dict(own)
        self._publish_inner_state()

    # ------------------------------------------------------------------------------------------------------- the steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step on one mini-batch; the L-th call also moves w and puts w' back on it.

        Parameters without a gradient stay where they are.

        Args:
            closure: Evaluates the model and returns the loss; called once, before the step.
        """
        self._refuse_at_center("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        position, inner_steps = self._phase()
        if self._only_allocates():
            return loss

        if self._inner is not None:
            self._inner_optimizer_step(position)
        offset = 0
        for number, group in enumerate(self.param_groups):
            offset = self._inner_step(number, position, offset)
            group["step"] += 1
            group["position"] = position + 1
        if position + 1 >= inner_steps:
            self._outer_step()
        return loss

    def _phase(self) -> tuple[int, int]:
        """The position in the cycle and its length, the same in all groups."""
        positions = {group["position"] for group in self.param_groups}
        lengths = {group["inner_steps"] for group in self.param_groups}
        if len(positions) > 1 or len(lengths) > 1:
            raise ValueError(
                "all param groups go through the cycle together, but their positions are "
                f"{sorted(positions)} and their inner_steps {sorted(lengths)}; make them equal"
            )
        return positions.pop(), lengths.pop()

    def _only_allocates(self) -> bool:
        """Make missing state. True if this call is for that alone: torch.distributed.checkpoint calls ``step()`` on an
        optimizer without state, with zero gradients and zero ``lr``, and that must not move anything.
        """
        empty = not self.state
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        f"EntropySGD does not support sparse gradients (parameter of shape {tuple(p.shape)}): the pull "
                        "and the noise move every weight; use a dense one, for example Embedding(sparse=False)"
                    )
                if p not in self.state:
                    self._allocate(p, group)
        return (
            empty
            and all(float(group["lr"]) == 0 for group in self.param_groups)
            and not any(p.grad.any() for group in self.param_groups for p in group["params"] if p.grad is not None)
        )

    def _inner_step(self, number: int, position: int, offset: int) -> int:
        """Move w' and mu of one group; ``offset`` is the place of the group's first weight in the noise. Returns that
        of the next group.
        """
        group, starting, plain = self.param_groups[number], position == 0, self._inner is None
        eta, gamma, epsilon, alpha = (float(group[name]) for name in ("inner_lr", "gamma", "epsilon", "alpha"))
        momentum, nesterov, weight_decay = float(group["momentum"]), group["nesterov"], float(group["weight_decay"])

        params, grads, states, offsets = [], [], [], []
        for p in group["params"]:
            grad = p.grad
            if grad is not None:
                params.append(p)
                grads.append(grad)
                states.append(self.state[p])
                offsets.append(offset)
            elif starting and p in self.state:
                self._restart(p)
            offset += p.numel()
        lists = [params, [state["center"] for state in states], [state["mean"] for state in states]]
        if momentum and plain:
            lists.append([self._buffer(p, state, "momentum_buffer") for p, state in zip(params, states, strict=True)])

        noise = math.sqrt(eta) * epsilon
        if plain and (kernel := self._kernel_of("inner", number, lists, offsets)) is not None:
            rule = Rule(eta, momentum, nesterov, weight_decay, gamma, alpha, noise, starting)
            kernel.inner_step(grads, rule, self._noise_of(group) if noise else None, int(group["step"]))
            return offset
        changed = [0, 2, *range(3, len(lists)), *([1] if starting else [])]
        for block in self._blocks_of("inner", number, lists, offsets)(grads, changed=changed):
            w_prime, w, mu, *velocity, grad = block.tensors
            if plain:
                if starting:
                    torch._foreach_copy_(w, w_prime)
                # dw' = gradient + gamma (w' - w) + weight decay w', where the pull is zero at w' = w
                pull = 0.0 if starting else gamma
                terms, decay = [(grad, 1.0)] + [(w, -pull)] * (pull > 0), pull + weight_decay
                _sgd(w_prime, terms, decay, *velocity, lr=eta, momentum=momentum, nesterov=nesterov, resting=starting)
            if noise:
                self._add_noise(block.parts(0), block.places, group, noise)
            _running_mean(mu, w if starting else mu, w_prime, alpha)
        return offset

    def _kernel_of(self, loop: str, number: int, lists: list[list[Tensor]], offsets: list[int]) -> KernelLists | None:
        """The kernel on the tensors of a group; None if torch's operations are to be used."""
        if self._fused is False or torch.compiler.is_compiling():
            return None
        key = loop, number
        kernel = self._kernels.get(key)
        if kernel is not None and kernel.still_of(*lists, offsets=offsets):
            return kernel
        self._kernels.pop(key, None)
        if self._fused is None and not (lists[0] and kernel_is_there(lists[0][0])):
            return None
        if not KernelLists.fits(*lists):
            if self._fused and lists[0]:
                raise RuntimeError(
                    "EntropySGD(fused=True) is for dense parameters on the CPU, all of a group in float32 or all in "
                    "float64; use fused=None, which falls back on torch's operations"
                )
            return None
        self._kernels[key] = KernelLists(*lists, offsets=offsets)
        return self._kernels[key]

    def _blocks_of(self, loop: str, number: int, lists: list[list[Tensor]], offsets: list[int]) -> FlatBlocks:
        """The blocks of a group, the same as in the last step unless its tensors are others now."""
        blocks = self._blocks.get((loop, number))
        if blocks is None or not blocks.still_of(*lists, offsets=offsets):
            blocks = self._blocks[loop, number] = FlatBlocks(*lists, offsets=offsets)
        return blocks

    def _restart(self, p: Tensor) -> None:
        """Put w and mu on w', and no velocity: the start of a cycle, for a parameter that has no gradient then."""
        state = self.state[p]
        state["center"].copy_(p)
        state["mean"].copy_(p)
        if "momentum_buffer" in state:
            state["momentum_buffer"].zero_()

    def _inner_optimizer_step(self, position: int) -> None:
        """The inner step by another optimizer, on gradients that have gamma (w' - w) added for the time of the step."""
        assert self._inner is not None
        originals: list[tuple[Tensor, Tensor]] = []
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group["lr"] = group["inner_lr"]
            params = [p for p in group["params"] if p.grad is not None]
            if position == 0:
                for p in params:
                    self.state[p]["center"].copy_(p)
                    for name in VELOCITIES:
                        value = self._inner.state[p].get(name) if p in self._inner.state else None
                        if isinstance(value, Tensor):
                            value.zero_()
            elif group["gamma"] and params:
                originals += [(p, p.grad) for p in params]
                w = [self.state[p]["center"] for p in params]
                pull = torch._foreach_sub(params, w)
                d = torch._foreach_add([p.grad for p in params], pull, alpha=float(group["gamma"]))
                for p, coupled in zip(params, d, strict=True):
                    p.grad = coupled
        try:
            self._inner.step()
        finally:
            for p, grad in originals:
                p.grad = grad
        self._publish_inner_state()

    def _outer_step(self) -> None:
        """Move w towards mu, put w' back on w, and close the cycle."""
        for number, group in enumerate(self.param_groups):
            momentum, nesterov = float(_outer(group, "momentum")), _outer(group, "nesterov")
            eta, weight_decay = float(group["lr"]), float(_outer(group, "weight_decay"))
            params = [p for p in group["params"] if self._moved(p)]
            states = [self.state[p] for p in params]
            lists = [params, [state["center"] for state in states], [state["mean"] for state in states]]
            if momentum:
                name = "outer_momentum_buffer"
                lists.append([self._buffer(p, state, name) for p, state in zip(params, states, strict=True)])
            offsets = [0] * len(params)
            group["position"] = 0
            if (kernel := self._kernel_of("outer", number, lists, offsets)) is not None:
                kernel.outer_step(Rule(lr=eta, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay))
                continue
            blocks = self._blocks_of("outer", number, lists, offsets)
            for block in blocks(changed=[0, 1, *range(3, len(lists))]):
                w_prime, w, mu, *velocity = block.tensors
                # dw = (w - mu) + weight decay w
                _sgd(w, [(mu, -1.0)], 1 + weight_decay, *velocity, lr=eta, momentum=momentum, nesterov=nesterov)
                torch._foreach_copy_(w_prime, w)

    def _moved(self, p: Tensor) -> bool:
        """Did the parameter take an inner step in this cycle? One that never has a gradient stays as it is."""
        return p in self.state and (
            p.grad is not None or not torch.equal(self.state[p]["mean"], self.state[p]["center"])
        )

    def _add_noise(self, w_prime: list[Tensor], places: list[int], group: dict[str, Any], scale: float) -> None:
        """Add ``scale`` times N(0, I). On the CPU it is a function of (seed, step, place); on an accelerator it comes
        from its own generator, seeded by them, and so is the same on every device of one kind.
        """
        seed, step = int(group["seed"]), int(group["step"])
        if w_prime[0].device.type == "cpu":
            self._noise_of(group).add_(w_prime, step, places, scale)
            return
        generator = torch.Generator(device=w_prime[0].device)
        for piece, place in zip(w_prime, places, strict=True):
            generator.manual_seed(hash((seed, step, place)) & 0x7FFFFFFFFFFFFFFF)
            noise = torch.empty_like(piece, memory_format=torch.preserve_format).normal_(generator=generator)
            piece.add_(noise, alpha=scale)

    def _noise_of(self, group: dict[str, Any]) -> GaussianNoise:
        """The noise of the group's seed, kept until another seed is asked for."""
        seed = int(group["seed"])
        if self._noise is None or self._noise.seed != seed:
            self._noise = GaussianNoise(seed)
        return self._noise

    # ----------------------------------------------------------------------------------------------------- the center

    @property
    def at_center(self) -> bool:
        """Does the model hold w now? At the start of a cycle, and within `center`."""
        return self._swapped or self._phase()[0] == 0

    @contextmanager
    def center(self, model: nn.Module | None = None) -> Iterator[None]:
        """Within ``with opt.center():`` the model holds w; afterwards w' again, whatever happened inside.

        Args:
            model: Restore the buffers of this model as well: for when its batch norm is refreshed within
                (`wideflat.refresh_batch_norm`), whose statistics belong to w and not to w'.
        """
        if self._swapped:  # nested: already there
            yield
            return
        swap = self._phase()[0] > 0
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if model is not None else []
        if swap:
            self._swap()
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            if swap:
                self._swap()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange w and w', in place: whoever shares the memory of the parameters sees it too."""
        params = [p for group in self.param_groups for p in group["params"] if p in self.state]
        lists = [params, [self.state[p]["center"] for p in params]]
        for w_prime, w in cache_blocks(*lists):
            kept = [tensor.clone() for tensor in w_prime]
            torch._foreach_copy_(w_prime, w)
            torch._foreach_copy_(w, kept)

    @torch.no_grad()
    def flush(self) -> None:
        """Close a partial cycle now: w moves by the outer step on what mu has gathered. Nothing at a cycle's start."""
        self._refuse_at_center("flush()")
        if self._phase()[0] > 0:
            self._outer_step()

    @torch.no_grad()
    def distance(self) -> Tensor:
        """d(w', w): half the squared distance between explorer and center, over all parameters."""
        total = torch.zeros((), dtype=torch.float64)
        if self._phase()[0] > 0:
            for group in self.param_groups:
                for p in group["params"]:
                    if p in self.state:
                        total += (p.detach() - self.state[p]["center"]).double().square().sum().cpu() / 2
        return total

    def _refuse_at_center(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} was called within `with opt.center():`, where the model holds w and the optimizer w'; "
                "call it after the block"
            )


def _outer(group: dict[str, Any], name: str) -> Any:
    value = group[f"outer_{name}"]
    return group[name] if value is None else value


def _sgd(
    x: list[Tensor],
    terms: list[tuple[list[Tensor], float]],
    decay: float,
    velocity: list[Tensor] | None = None,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    resting: bool = False,
) -> None:
    """One step of SGD on x with the gradient d = sum of coefficient * tensor over the terms + decay * x.

    Everything is in place, without memory for d. With Nesterov momentum m the step is along d + m v, where v is the new
    velocity m v + d. That is (1 + m) v - m (old v), of which the old part is done first. It moves x by lr m (old v),
    and thereby what is added to v as decay * x; the factor of the old v makes up for that.

    Args:
        x: The weights.
        terms: Tensors and their coefficients. The first coefficient is 1 or -1, and one term alone is a fused kernel.
        decay: The coefficient of x itself.
        velocity: v; needed with momentum.
        lr: Learning rate.
        momentum: m.
        nesterov: Nesterov momentum.
        resting: Take the velocity for zero, without reading it.
    """
    (first, sign), *others = terms
    if not others and x[0].device.type in FUSED:
        torch._fused_sgd_(
            x,
            first,
            [] if velocity is None else velocity,
            weight_decay=decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=nesterov,
            maximize=sign < 0,
            is_first_step=resting,
        )
        return
    if not momentum:
        torch._foreach_mul_(x, 1 - lr * decay)
        for tensors, coefficient in terms:
            torch._foreach_add_(x, tensors, alpha=-lr * coefficient)
        return
    assert velocity is not None
    if nesterov and not resting:
        torch._foreach_add_(x, velocity, alpha=lr * momentum)
    kept = momentum * (1 - decay * lr) if nesterov else momentum
    if resting:
        torch._foreach_copy_(velocity, first)
        torch._foreach_mul_(velocity, sign)
    elif x[0].device.type == "cpu" and sign == 1:  # one pass over memory instead of two
        for v, tensor in zip(velocity, first, strict=True):
            torch.add(tensor, v, alpha=kept, out=v)
    else:
        torch._foreach_mul_(velocity, kept)
        torch._foreach_add_(velocity, first, alpha=sign)
    for tensors, coefficient in [*others, (x, decay)]:
        if coefficient:
            torch._foreach_add_(velocity, tensors, alpha=coefficient)
    torch._foreach_add_(x, velocity, alpha=-lr * (1 + momentum) if nesterov else -lr)


def _running_mean(mu: list[Tensor], before: list[Tensor], w_prime: list[Tensor], alpha: float) -> None:
    """Set mu <- alpha before + (1 - alpha) w', where ``before`` is mu itself or, at the start of a cycle, w."""
    if before is mu:
        torch._foreach_lerp_(mu, w_prime, 1 - alpha)
    else:
        for out, w, end in zip(mu, before, w_prime, strict=True):
            torch.lerp(w, end, 1 - alpha, out=out)


def _check(group: dict[str, Any]) -> None:
    """Refuse values that cannot be meant."""
    for name in ("lr", "inner_lr", "gamma", "epsilon", "weight_decay", "momentum"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} must be >= 0, got {group[name]}")
    for name in ("outer_momentum", "outer_weight_decay"):
        if group[name] is not None and not group[name] >= 0:
            raise ValueError(f"{name} must be >= 0 or None, got {group[name]}")
    if not 0 <= group["alpha"] <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {group['alpha']}")
    if not isinstance(group["inner_steps"], int) or group["inner_steps"] < 1:
        raise ValueError(f"inner_steps must be a whole number >= 1, got {group['inner_steps']!r}")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed must be a whole number, got {group['seed']!r}")
    for nesterov, momentum in (("nesterov", "momentum"), ("outer_nesterov", "outer_momentum")):
        if group[nesterov] and not (group[momentum] or (group[momentum] is None and group["momentum"])):
            raise ValueError(f"{nesterov} needs a {momentum} > 0, got {group[momentum]}")
