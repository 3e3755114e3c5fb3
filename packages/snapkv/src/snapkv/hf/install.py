"""What a model carries while it has compressed caches, and taking it off again.

A model is changed in two ways: its attention is wrapped (`snapkv.hf.attention`), and some of its
methods are, on the instance (`snapkv.hf.generate`). The first cache puts that on. When the last one
is gone, the model has the attention implementations and the methods it had, in every sub-config;
what somebody else has set in the meantime stays as it is.

A cache may be collected at any time, in any thread, even while another one is being made. So a
finalizer never waits: it notes that there is one user less, and takes off what nobody needs only
where nobody is at work on a model; whoever is looks again when done.
"""

import contextlib
import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from snapkv.errors import CacheMismatchError, UnsupportedModelError
from snapkv.hf.attention import is_wrapped, plain_name, register_attention
from snapkv.hf.build import layers_for
from snapkv.hf.generate import INSTALLATION, announce_prompts, stop_announcing
from snapkv.hf.identity import require_model
from snapkv.policies import FullCache

_lock = threading.Lock()
_perhaps_unused: "deque[Installation]" = deque()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep other threads, and finalizers of this one, from changing a model."""
    try:
        with _lock:
            yield
    finally:
        _take_off_unused()


def _take_off_unused() -> None:
    """Undo what nobody uses any more; where somebody is at work, he does so when he is done."""
    while _perhaps_unused and _lock.acquire(blocking=False):
        try:
            while _perhaps_unused:
                installation = _perhaps_unused.popleft()
                if not installation.is_used:
                    installation.take_off()
        finally:
            _lock.release()


class Installation:
    """What one model carries, and who uses it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._configs: list[PreTrainedConfig] = []  # whose attention is wrapped
        self.caches: set[object] = set()  # a mark for every one that lives, its copies for one
        self.installs: set[object] = set()  # a mark for every one that was not undone

    @property
    def model(self) -> PreTrainedModel | None:
        """Whose it is; None where the model is gone before its caches."""
        return self._model()

    @property
    def is_used(self) -> bool:
        return bool(self.caches or self.installs)

    def put_on(self, model: PreTrainedModel) -> None:
        """Wrap the model's attention and let it announce prompts, if need be."""
        try:
            self._configs = _text_configs(model)
            for config in self._configs:
                name = config._attn_implementation
                if not (is_wrapped(name) or _decodes_through_interface(model)):
                    raise UnsupportedModelError(
                        f"model: expected one whose attention goes through transformers' "
                        f"AttentionInterface, got {type(model).__name__}, which computes it by "
                        "itself; it cannot be compressed"
                    )
                _require_unasked(config, plain_name(name) or "eager")
                _set(config, register_attention(plain_name(name) or "eager"))
            announce_prompts(model)
            vars(model)[INSTALLATION] = self
        except BaseException:
            if not self.is_used:
                self.take_off()
            raise

    def take_off(self) -> None:
        """Give back what the model had, except where somebody else has changed it.

        A config that another model's caches need goes on as it is.
        """
        configs, self._configs = self._configs, []
        for config in configs:
            if not any(config is known for other in _known for known in other._configs):
                _unset(config)
        model = self.model
        if model is not None:
            stop_announcing(model)
            vars(model).pop(INSTALLATION, None)

    def lay_aside(self) -> None:
        """Let the model attend by itself, under the plain name, while caches of it may live."""
        with _alone():
            for config in self._configs:
                _unset(config)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within this block the model attends by itself; caches that live refuse to read on."""
        self.lay_aside()
        try:
            yield
        finally:
            with _alone():
                model = self.model
                if self.is_used and model is not None and vars(model).get(INSTALLATION) is self:
                    self.put_on(model)

    def give_back(self, model: PreTrainedModel) -> None:
        """As `take_off`, whoever else needs it and whoever put it on."""
        for config in _text_configs(model):
            _unset(config)
        self.take_off()

    def leave(self, users: set[object], mark: object) -> None:
        """Count one user less; called by finalizers, in any thread at any time."""
        users.discard(mark)
        _perhaps_unused.append(self)
        _take_off_unused()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installation":
        """For the copy of the model that is being made: it has no caches yet."""
        model = memo.get(id(self.model))
        return self if model is None else _copied(model, copy.deepcopy(self._configs, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again for the unpickled model."""
        return _copied, (self.model, self._configs)


_known: "weakref.WeakSet[Installation]" = weakref.WeakSet()
"""All there are; changed and looked through under the lock."""


def _copied(model: PreTrainedModel, configs: list[PreTrainedConfig]) -> Installation:
    """What a copy of a model carries; in another process its attention is registered first."""
    copied = Installation(model)
    with _alone():
        copied._configs = configs
        for config in configs:
            if is_wrapped(config._attn_implementation):
                register_attention(plain_name(config._attn_implementation) or "eager")
        _known.add(copied)
    return copied


def _require_unasked(config: PreTrainedConfig, name: str) -> None:
    """Refuse a model whose own code asks for this name, and would not find it under ours."""
    for asked, setting in (("eager", "reorder_and_upcast_attn"), ("flex", "num_kv_shared_layers")):
        if name.startswith(asked) and getattr(config, setting, None):
            raise UnsupportedModelError(
                f"attn_implementation: expected another than {name!r} with {setting}, got "
                f"{config.model_type}, whose code then looks for that name; load the model with "
                "attn_implementation='sdpa'"
            )


def _set(config: PreTrainedConfig, name: str | None) -> None:
    config._attn_implementation = {"": name}  # of this config alone


def _unset(config: PreTrainedConfig) -> None:
    if is_wrapped(config._attn_implementation):
        _set(config, plain_name(config._attn_implementation))


def _decodes_through_interface(model: PreTrainedModel) -> bool:
    """Whether the text decoder's attention can be set, whatever a picture tower does."""
    text = type(model.config.get_text_config(decoder=True))
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part._can_set_attn_implementation() for part in parts if type(part.config) is text)


def _text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that say how the text decoder attends: parts of a model may have copies."""
    text = model.config.get_text_config(decoder=True)
    waiting = [text, model.config]
    waiting += [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [part for part in parts if isinstance(part, PreTrainedConfig)]
    return [config for config in found.values() if type(config) is type(text)]


class Use:
    """A cache's part in its model's installation; copies of the cache share it."""

    def __init__(self, installation: Installation, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.modules = weakref.WeakSet(model.modules())  # none of which this keeps alive
        self._text = model.config.get_text_config(decoder=True)
        mark = object()
        weakref.finalize(self, installation.leave, installation.caches, mark).atexit = False
        installation.caches.add(mark)

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise CacheMismatchError(
                "cache: expected the model the cache was made for to be there, got none; "
                "keep the model as long as its cache"
            )
        return model

    @property
    def is_in_place(self) -> bool:
        """Whether the model's attention is wrapped, whoever has changed it."""
        return is_wrapped(self._text._attn_implementation)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Use":
        return self


def use(model: PreTrainedModel) -> Use:
    """Put on a model what its caches need, for as long as the result lives."""
    with _alone():
        return Use(_put_on(model), model)


def _put_on(model: PreTrainedModel) -> Installation:
    installation = _of(model) or Installation(model)
    _known.add(installation)
    installation.put_on(model)
    return installation


def _of(model: PreTrainedModel) -> Installation | None:
    return next((each for each in _known if each.model is model), None)


class Installed:
    """An `install`, to be undone by `uninstall` or at the end of a ``with`` block."""

    def __init__(self, installation: Installation) -> None:
        self._installation, self._mark = installation, object()
        installation.installs.add(self._mark)

    def uninstall(self) -> None:
        """Undo this `install`; without another one or a cache, the model is as it was."""
        self._installation.leave(self._installation.installs, self._mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(model: PreTrainedModel) -> Installed:
    """Route a model's attention through snapkv until that is undone, with or without caches.

        with snapkv.install(model):
            ...  # as many caches as you like

    Every `CompressedCache` does this for as long as it lives; install to have it done once for
    many short-lived ones. Without a cache of this kind the model answers as ever, bit for bit.
    What is returned undoes it, at the end of the ``with`` block or by its method `uninstall`.

    Raises:
        InvalidTypeError: not a transformers model.
        UnsupportedModelError: the model cannot be compressed correctly.
    """
    layers_for(model, FullCache())
    with _alone():
        return Installed(_put_on(model))


def uninstall(model: PreTrainedModel) -> None:
    """Give a model back the attention implementations and the very methods it had, at once.

    Undoes every `install` of it, also of a copy of a model that had caches then. Caches that still
    live refuse to read on, until there is another cache of the model or it is installed again.

    Raises:
        InvalidTypeError: not a transformers model.
    """
    require_model(model)
    with _alone():
        installation = _of(model) or Installation(model)
        installation.installs.clear()
        installation.give_back(model)
