"""What all documents of a library have in common: model, tokenizer, prefix, policy and bits."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

from transformers import PreTrainedModel

from snapkv.errors import LibraryError
from snapkv.hf.identity import identity_of
from snapkv.hf.saved import policy_of
from snapkv.library.frame import fingerprint, prefix_ids
from snapkv.policies import FullCache, Policy
from snapkv.storage.codes import Bits

FORMAT = "snapkv library 1"


@dataclass(frozen=True, kw_only=True)
class About:
    """How the documents of a library were read; what `library.json` says.

    Attributes:
        model: what tells the model from others, see `snapkv.hf.identity`.
        model_name: what users call it.
        tokenizer: what tells the tokenizer and its chat template from others.
        prefix_ids: the tokens before every document.
        policy: what was kept of them, as the policy describes itself.
        bits: in how many bits; None for the model's own dtype.
    """

    model: dict[str, Any]
    model_name: str
    tokenizer: str
    prefix_ids: tuple[int, ...]
    policy: dict[str, Any]
    bits: Bits | None

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: Any,
        policy: Policy | None,
        bits: Bits | None,
        model_name: str | None,
    ) -> Self:
        """What a new library would say."""
        return cls(
            model=identity_of(model),
            model_name=model_name or name_of(model),
            tokenizer=fingerprint(tokenizer),
            prefix_ids=tuple(prefix_ids(tokenizer)),
            policy=json.loads(json.dumps((policy or FullCache()).describe())),
            bits=bits,
        )

    def as_json(self) -> str:
        """The file's content."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, content: bytes, place: str) -> Self:
        """What `as_json` has written.

        Raises:
            LibraryError: it is something else, or of a later version.
        """
        try:
            found = json.loads(content)
            version = found.pop("format")
            if version == FORMAT and set(found) == {field.name for field in fields(cls)}:
                return cls(**{**found, "prefix_ids": tuple(found["prefix_ids"])})
        except (ValueError, LookupError, TypeError, AttributeError):
            version = None
        raise LibraryError(
            f"library: expected {place!r} to say {FORMAT!r}, got {version or 'something else'!r}; "
            "choose another folder, or add the documents to a new one"
        )

    def made_policy(self, tokenizer: Any) -> Policy:
        """The policy that reads a document."""
        return policy_of(self.policy).with_tokenizer(tokenizer)

    @property
    def who(self) -> str:
        """The model by its name, class and dtype."""
        return f"{self.model_name} ({self.model['class']}, {self.model['dtype']})"

    @property
    def policy_in_words(self) -> str:
        """The policy with its parameters: full(), or snapkv(budget=1024, ...)."""
        return _said(self.policy)

    def require_same(self, other: "About") -> None:
        """Refuse another model or tokenizer than the documents were read by.

        Raises:
            LibraryError: such a one; the message has both names.
        """
        if other.model != self.model:
            what = "" if other.who != self.who else " with other weights or settings"
            raise LibraryError(
                f"model: expected {self.who}, which has read this library's documents, got "
                f"{other.who}{what}; pass that model, or add the documents to another library"
            )
        if other.tokenizer != self.tokenizer:
            raise LibraryError(
                f"tokenizer: expected the tokenizer and chat template of {self.who}, by which this "
                f"library's documents were read, got others with {other.who}; pass those, or add "
                "the documents to another library"
            )

    def require_same_keeping(self, policy: Policy | None, bits: Bits | None) -> None:
        """Refuse another policy than the library's, or other bits; None asks for the library's.

        Raises:
            LibraryError: such a one; the message has both.
        """
        asked = None if policy is None else json.loads(json.dumps(policy.describe()))
        for name, own, other in (
            ("policy", self.policy, asked),
            ("bits", self.bits, bits),
        ):
            if other is not None and other != own:
                raise LibraryError(
                    f"{name}: expected what this library's documents were read with, {_said(own)}, "
                    f"got {_said(other)}; leave it out, or add the documents to another library"
                )


def name_of(model: PreTrainedModel) -> str:
    """What a model is called: by where it was loaded from, else by its class."""
    return cast(str, getattr(model, "name_or_path", "")) or type(model).__name__


def _said(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    given = {key: _said(part) for key, part in value.items() if key != "name" and part is not None}
    parameters = ", ".join(f"{key}={part}" for key, part in given.items())
    return f"{value.get('name', '')}({parameters})"
