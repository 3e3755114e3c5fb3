"""Deciding when the layers of a model choose what they keep of a prompt."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_group import LayerGroup
from snapkv.cache.shared_budget import SharedBudget
from snapkv.policies import AcrossLayers, PromptLayer


@dataclass(eq=False)
class Chooser:
    """Decides when the layers that have read the end of a prompt choose what they keep of it.

    There are three strategies:

    - at once: a layer that may not wait chooses by itself;
    - in groups: consecutive layers wait for each other and choose together, see `LayerGroup`;
    - across layers: a policy that shares one budget among all layers scores the groups as they
      come, and what the layers keep is settled after the last group, see `SharedBudget`.

    Attributes:
        unread_layers: indices of the layers, in order, that have yet to read the end of the prompt
            or turn in this forward pass. When the pass is over, these layers have missed it.
        group: the layers that wait for each other.
    """

    unread_layers: tuple[int, ...] = ()
    group: LayerGroup = field(default_factory=LayerGroup, init=False)
    _shared: SharedBudget | None = field(default=None, init=False)

    def offer(
        self,
        layer: CompressedLayer,
        prompt: PromptLayer,
        output: Tensor | None = None,
        check_votes: Callable[[LayerGroup], None] | None = None,
        *,
        may_wait: bool = False,
        is_final: bool = False,
    ) -> None:
        """Let a layer that has read the prompt choose, now or together with later layers.

        Args:
            layer: the layer, which holds the whole prompt.
            prompt: the prompt's states in this layer.
            output: (B, Hq, Dv), the model's attention output of the prompt's last token.
            check_votes: checks the votes of a group before it selects. It may raise.
            may_wait: whether the layer may wait for later layers.
            is_final: whether later turns must not choose from this prompt again, even if all of it
                is kept.

        Raises:
            UnsupportedModelError: the votes do not agree with the model's attention, or layers with
                different numbers of heads share a budget.
            InvalidArgumentError: the policy does not work with this prompt.
            OutOfMemoryError: there is no room for the offloaded tokens.
        """
        while not self.group.add(layer, prompt, output, check_votes):
            self._choose(is_final=is_final)
        if self.group.is_full or not may_wait:
            self._choose(is_final=is_final)

    def finish(self) -> None:
        """Let the layers that are still waiting choose, since no later layer will join them.

        Raises:
            SnapKVError: the same errors as in `offer`.
        """
        if self.group.layers:
            self._choose()

    def _choose(self, *, is_final: bool = False) -> None:
        """Let the waiting group choose, or add it to the shared budget, and begin a new group."""
        group, self.group = self.group, LayerGroup()
        if group.check_votes is not None:
            group.check_votes(group)
        policy = group.layers[0].policy
        if not isinstance(policy, AcrossLayers) or not policy.shares:
            group.choose(policy, is_final=is_final)
            return
        with ops.scoring(group.stack.keys):
            if self._shared is None or not group.stack.depth:
                self._shared = SharedBudget(policy, group.prompts[0], is_final=is_final)
            self._shared.add(group)
        if group.reaches_last:
            self._shared = None
