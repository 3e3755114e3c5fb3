"""Installing wrappers on a model while it has compressed caches, and removing them again.

A model is changed in two ways: its attention is wrapped (`snapkv.hf.attention`), and so are some of
its methods, on the instance (`snapkv.hf.generate`). The first cache installs both. When the last
cache is deleted, the model gets back its attention implementation, in every sub-config, and its
methods. What somebody else has set on the model in the meantime is left alone.

A cache may be garbage-collected at any time, in any thread, even while another one is being made.
So a finalizer never waits for the lock: it counts one user less and queues the installation. If
nobody holds the lock, it removes unused installations at once; otherwise the holder of the lock
does so when it is done.
"""

import contextlib
import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from snapkv.errors import CacheMismatchError, UnsupportedModelError, wrong
from snapkv.hf.attention import is_wrapped, plain_name, register_attention
from snapkv.hf.build import layers_for
from snapkv.hf.generate import INSTALLATION, announce_prompts, stop_announcing
from snapkv.hf.identity import require_model, unwrapped
from snapkv.policies import FullCache

_lock = threading.Lock()
_perhaps_unused: "deque[Installation]" = deque()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock, so that neither other threads nor finalizers change a model in this block."""
    try:
        with _lock:
            yield
    finally:
        _take_off_unused()


def _take_off_unused() -> None:
    """Remove unused installations, unless the lock is held; its holder calls this again."""
    while _perhaps_unused and _lock.acquire(blocking=False):
        try:
            while _perhaps_unused:
                installation = _perhaps_unused.popleft()
                if not installation.is_used:
                    installation.take_off()
        finally:
            _lock.release()


class Installation:
    """The wrappers that are installed on one model, and the users that need them.

    Args:
        model: the model, which is not kept alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._configs: list[PreTrainedConfig] = []  # the configs with a wrapped implementation
        self.caches: set[object] = set()  # one mark per living cache, shared by its copies
        self.installs: set[object] = set()  # one mark per `install` that was not undone

    @property
    def model(self) -> PreTrainedModel | None:
        """The model, or None if it has been deleted."""
        return self._model()

    @property
    def is_used(self) -> bool:
        """Whether the wrappers are still needed, by a cache or after a call of `install`."""
        return bool(self.caches or self.installs)

    def put_on(self, model: PreTrainedModel) -> None:
        """Wrap the attention and the methods of the model in place, unless this is done already.

        Raises:
            UnsupportedModelError: the attention of the model cannot be wrapped. The model is
                unchanged then, unless it is used already.
        """
        try:
            self._configs = _text_configs(model)
            for config in self._configs:
                name = config._attn_implementation
                if not (is_wrapped(name) or _decodes_through_interface(model)):
                    raise wrong(
                        "model",
                        f"the attention of {type(model).__name__} does not go through "
                        "transformers' AttentionInterface",
                        "Use the default cache of transformers for this model",
                        UnsupportedModelError,
                    )
                _require_renamable(config, plain_name(name) or "eager")
                _set(config, register_attention(plain_name(name) or "eager"))
            announce_prompts(model)
            vars(model)[INSTALLATION] = self
        except BaseException:
            if not self.is_used:
                self.take_off()
            raise

    def take_off(self) -> None:
        """Remove the wrappers from the model, in place, whether or not they are still used.

        What somebody else has set in the meantime is left alone, and so is a config that the
        caches of another model also use. The caller must hold the lock.
        """
        configs, self._configs = self._configs, []
        for config in configs:
            if not any(config is known for other in _known for known in other._configs):
                _unset(config)
        model = self.model
        if model is not None:
            stop_announcing(model)
            vars(model).pop(INSTALLATION, None)

    def unwrap(self) -> None:
        """Unwrap the attention of the model in place, although caches of it may be in use."""
        with _alone():
            for config in self._configs:
                _unset(config)

    @contextlib.contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Unwrap the attention of the model within this block, and wrap it again afterwards.

        Within the block, caches of the model raise an error if they are used.
        """
        self.unwrap()
        try:
            yield
        finally:
            with _alone():
                model = self.model
                if self.is_used and model is not None and vars(model).get(INSTALLATION) is self:
                    self.put_on(model)

    def give_back(self, model: PreTrainedModel) -> None:
        """Remove the wrappers from the model in place, even if other models or caches use them.

        Unlike `take_off`, this also unwraps configs that the model shares with other models, and
        those of a model that was copied while it was wrapped. The recorded users stay, so `is_used`
        does not change. The caller must hold the lock.

        Args:
            model: the model of this installation.
        """
        for config in _text_configs(model):
            _unset(config)
        self.take_off()

    def leave(self, users: set[object], mark: object) -> None:
        """Remove a user, and the wrappers after the last one; finalizers call it in any thread.

        Args:
            users: `caches` or `installs`.
            mark: the user's object in this set.
        """
        users.discard(mark)
        _perhaps_unused.append(self)
        _take_off_unused()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installation":
        """Return an installation for the copy of the model that is being made; it has no caches."""
        model = memo.get(id(self.model))
        return self if model is None else _copied(model, copy.deepcopy(self._configs, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the installation for the unpickled model."""
        return _copied, (self.model, self._configs)


_known: "weakref.WeakSet[Installation]" = weakref.WeakSet()
"""All installations; whoever changes or reads the set must hold the lock."""


def _copied(model: PreTrainedModel, configs: list[PreTrainedConfig]) -> Installation:
    """Return the installation of a copied or unpickled model with these configs."""
    copied = Installation(model)
    with _alone():
        copied._configs = configs
        for config in configs:  # another process has not registered the wrapper yet
            if is_wrapped(config._attn_implementation):
                register_attention(plain_name(config._attn_implementation) or "eager")
        _known.add(copied)
    return copied


def _require_renamable(config: PreTrainedConfig, name: str) -> None:
    """Raise if the model's code compares the name of its implementation, which a wrapper changes.

    Raises:
        UnsupportedModelError: it does so for this implementation and these settings.
    """
    for plain, setting in (("eager", "reorder_and_upcast_attn"), ("flex", "num_kv_shared_layers")):
        if name.startswith(plain) and getattr(config, setting, None):
            raise wrong(
                "attn_implementation",
                f"the code of {config.model_type} with {setting} depends on the name {name!r}, "
                "which would be changed by a wrapper",
                "Load the model with attn_implementation='sdpa'",
                UnsupportedModelError,
            )


def _set(config: PreTrainedConfig, name: str | None) -> None:
    config._attn_implementation = {"": name}  # a dict sets it for this config and not for its parts


def _unset(config: PreTrainedConfig) -> None:
    if is_wrapped(config._attn_implementation):
        _set(config, plain_name(config._attn_implementation))


def _decodes_through_interface(model: PreTrainedModel) -> bool:
    """Return whether the attention of the text decoder, not of a vision tower, can be wrapped."""
    text = type(model.config.get_text_config(decoder=True))
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part._can_set_attn_implementation() for part in parts if type(part.config) is text)


def _text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return all configs that set the attention of the text decoder.

    There may be several, because submodels may have copies of the config.
    """
    text = model.config.get_text_config(decoder=True)
    waiting = [text, model.config]
    waiting += [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in configs:
            configs[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [part for part in parts if isinstance(part, PreTrainedConfig)]
    return [config for config in configs.values() if type(config) is type(text)]


class Use:
    """The use of a model by one cache, which ends when the cache and its copies are deleted.

    Args:
        installation: the installation of the model.
        model: the model, which is not kept alive.
    """

    def __init__(self, installation: Installation, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.modules = weakref.WeakSet(model.modules())
        self._text = model.config.get_text_config(decoder=True)
        mark = object()
        weakref.finalize(self, installation.leave, installation.caches, mark).atexit = False
        installation.caches.add(mark)

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            CacheMismatchError: the model has been deleted.
        """
        model = self._model()
        if model is None:
            raise wrong(
                "cache",
                "the model that the cache was made for has been deleted",
                "Keep a reference to the model as long as you use the cache",
                CacheMismatchError,
            )
        return model

    @property
    def is_in_place(self) -> bool:
        """Whether the attention of the model is still wrapped."""
        return is_wrapped(self._text._attn_implementation)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Use":
        return self


def use(model: PreTrainedModel) -> Use:
    """Install the wrappers on a model for as long as the returned object is alive.

    Raises:
        UnsupportedModelError: the attention of the model cannot be wrapped.
    """
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
    """An installation made by `install`; `uninstall` or the end of a ``with`` block undoes it."""

    def __init__(self, installation: Installation) -> None:
        self._installation, self._mark = installation, object()
        installation.installs.add(self._mark)

    def uninstall(self) -> None:
        """Undo this `install`; the wrappers are removed unless something else needs them."""
        self._installation.leave(self._installation.installs, self._mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(model: PreTrainedModel) -> Installed:
    """Wrap the attention of a model until this is undone, whether it has caches or not.

        with snapkv.install(model):
            ...  # make any number of caches

    Every `CompressedCache` does this for as long as it exists. Call `install` to do it only once
    for many short-lived caches. Without a compressed cache, the outputs of the model are the same,
    bit for bit.

    Args:
        model: a transformers model, which is changed in place, or a `PeftModel` around one.

    Returns:
        An object that undoes the installation at the end of a ``with`` block, or by its method
        `uninstall`.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
        UnsupportedModelError: the model cannot be compressed correctly.
    """
    model = unwrapped(model)
    layers_for(model, FullCache())
    with _alone():
        return Installed(_put_on(model))


def uninstall(model: PreTrainedModel) -> None:
    """Remove the wrappers from a model at once, and undo every call of `install` for it.

    It also works for a copy of a model that had caches when it was copied. Existing caches raise an
    error if they read further tokens, until another cache of the model is made or `install` is
    called again.

    Args:
        model: a transformers model, which is changed in place, or a `PeftModel` around one.

    Raises:
        InvalidTypeError: `model` is not a transformers model.
    """
    model = unwrapped(model)
    require_model(model)
    with _alone():
        installation = _of(model) or Installation(model)
        installation.installs.clear()
        installation.give_back(model)
