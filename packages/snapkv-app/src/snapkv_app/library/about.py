"""Describe how the documents of a library are read: model, tokenizer, template, policy, bits."""

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from snapkv.errors import LibraryError, wrong
from snapkv.storage.bits import Bits, KVCodes
from snapkv_app.control_words import (
    content_ids,
    quoted,
    special_tokens_around,
    tokenized,
    unquoted,
)

if TYPE_CHECKING:  # imports torch, which listing documents does not need
    from transformers import PreTrainedModel

    from snapkv.policies import Policy

LibraryBits = Bits | KVCodes | Literal["none"]
"""The bits in which keys and values are stored; "none" for the model's own dtype."""

FORMAT = "snapkv library 2"

DEFAULT_BITS: Bits = "int4"
"""The bits of a new library; `docs/results.md` compares its answers with those of 16 bits."""

_DOCUMENTS = "the-documents-so-far"
_SAMPLE = "Question: 2 tokenizers, one text?\n\tÄ 你好 \U0001f600"


@dataclass(frozen=True, kw_only=True)
class About:
    """The description of how all documents of a library are read, stored in `library.json`."""

    model: dict[str, Any]  # the identity of the model, see `snapkv.hf.identity`
    model_name: str  # the name of the model in messages
    tokenizer: str  # a digest of the tokenizer and its chat template
    prefix_ids: tuple[int, ...]  # the tokens before every document
    policy: dict[str, Any]  # the name and the parameters of the policy
    bits: "Bits | dict[str, Any] | None"  # as they were passed; None for the model's dtype
    max_bytes: int | None = None  # the limit of all files of keys and values together

    @classmethod
    def of(
        cls,
        model: "PreTrainedModel",
        tokenizer: Any,
        policy: "Policy | None",
        bits: LibraryBits | None,
        model_name: str | None,
    ) -> Self:
        """Build the description of a new library.

        Args:
            model: the model that will read the documents.
            tokenizer: its tokenizer.
            policy: selects the tokens to keep; None keeps all.
            bits: the bits of stored keys and values; None for `DEFAULT_BITS`.
            model_name: the name of the model in error messages; None for the name by which it was
                loaded.

        Raises:
            InvalidArgumentError: `bits` is not a known name, the chat template does not repeat the
                text of the user, or the tokenizer turns other words into control tokens.
        """
        from snapkv.hf.identity import identity_of
        from snapkv.policies import FullCache

        usual = cast(str, getattr(model, "name_or_path", "")) or type(model).__name__
        return cls(
            model=identity_of(model),
            model_name=model_name or usual,
            tokenizer=fingerprint_of(tokenizer),
            prefix_ids=tuple(_prefix_ids(tokenizer)),
            policy=_as_read(policy or FullCache()),
            bits=_as_given(DEFAULT_BITS if bits is None else bits),
        )

    def as_json(self) -> str:
        """Return the content of `library.json`."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, content: bytes, place: str) -> Self:
        """Build the description from the content of `library.json`, which `as_json` returns.

        Args:
            content: the bytes of the file.
            place: the path of the file, for error messages.

        Raises:
            LibraryError: the content has another format or version.
        """
        try:
            found = json.loads(content)
            version = found.pop("format")
            is_bound = found["max_bytes"] is None or isinstance(found["max_bytes"], int)
            names = {field.name for field in fields(cls)}
            if version == FORMAT and set(found) == names and is_bound:
                return cls(**{**found, "prefix_ids": tuple(found["prefix_ids"])})
        except (ValueError, LookupError, TypeError, AttributeError):
            version = None
        raise wrong(
            "library",
            f"expected a library with the format {FORMAT!r} in {place!r}, but got "
            f"{version or 'something else'!r}",
            "Choose a different folder, or add the documents to a new library",
            LibraryError,
        )

    def made_policy(self, tokenizer: Any) -> "Policy":
        """Build the policy that compresses the documents.

        A policy that looks at token ids takes them from `tokenizer`.

        Raises:
            CacheMismatchError: this version does not know the name of the policy.
        """
        from snapkv.hf.saved import policy_of

        return policy_of(self.policy).with_tokenizer(tokenizer)

    @property
    def who(self) -> str:
        """The name of the model, with its class and its dtype, for messages."""
        return f"{self.model_name} ({self.model['class']}, {self.model['dtype']})"

    @property
    def policy_in_words(self) -> str:
        """The policy with its parameters for messages, such as "snapkv(budget=1024)"."""
        return _text(self.policy)

    def require_same(self, other: "About") -> None:
        """Raise unless `other` describes the same model and tokenizer.

        The prefix, the policy and the bits are not compared.

        Raises:
            LibraryError: the model or the tokenizer differs.
        """
        if other.model != self.model:
            what = "" if other.who != self.who else " with other weights or settings"
            raise wrong(
                "model",
                f"the documents of this library were read with {self.who}, but got "
                f"{other.who}{what}",
                "Use the same model, or add the documents to a different library",
                LibraryError,
            )
        if other.tokenizer != self.tokenizer:
            raise wrong(
                "tokenizer",
                "the documents of this library were read with the tokenizer and chat template of "
                f"{self.who}, and those of {other.who} are different",
                "Use the same tokenizer and template, or add the documents to a different library",
                LibraryError,
            )

    @property
    def codes(self) -> KVCodes | None:
        """The codes that quantize stored keys and values; None for the dtype of the model."""
        return None if self.bits is None else KVCodes.of(self.bits, "bits")

    def require_same_keeping(self, policy: "Policy | None", bits: LibraryBits | None) -> None:
        """Raise unless the documents of this library are stored with `policy` and `bits`.

        None for either of them agrees with every library.

        Raises:
            InvalidArgumentError: `bits` is not a known name.
            LibraryError: the policy or the bits differ.
        """
        asked = None if policy is None else _as_read(policy)
        codes = None if bits is None else "none" if bits == "none" else KVCodes.of(bits, "bits")
        own_codes = self.codes or "none"
        for name, own, other in (("policy", self.policy, asked), ("bits", own_codes, codes)):
            if other is not None and other != own:
                raise wrong(
                    name,
                    f"the documents of this library were read with {_text(own)}, but got "
                    f"{_text(other)}",
                    "Remove this option, or add the documents to a different library",
                    LibraryError,
                )


def _as_read(policy: "Policy") -> dict[str, Any]:
    """Return the name and the parameters of a policy as they would be read back from JSON."""
    return cast(dict[str, Any], json.loads(json.dumps(policy.as_saved())))


def _as_given(bits: LibraryBits) -> Bits | dict[str, Any] | None:
    """Convert `bits` to a value that can be stored in JSON; "none" becomes None.

    Raises:
        InvalidArgumentError: `bits` is not a known name.
    """
    if isinstance(bits, KVCodes):
        return asdict(bits)
    if bits == "none":
        return None
    KVCodes.of(bits, "bits")
    return bits


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "data" in value:  # a gate, which is identified by its weights
        return hashlib.sha256(base64.b64decode(value["data"])).hexdigest()[:16]
    given = {key: _text(part) for key, part in value.items() if key != "name" and part is not None}
    parameters = ", ".join(f"{key}={part}" for key, part in given.items())
    return f"{value.get('name', '')}({parameters})"


# The prompt around documents: the chat template, or special tokens.


def _prefix_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that the chat template or the tokenizer puts before the first document.

    Raises:
        InvalidArgumentError: the chat template does not repeat the text of the user, or the
            tokenizer turns other words into control tokens.
    """
    if tokenizer.chat_template:
        return _ids(tokenizer, _around(tokenizer, "")[0])
    return special_tokens_around(tokenizer)[0]


def document_ids(tokenizer: Any, name: str, text: str) -> list[int]:
    """Tokenize a document: a line with its name, its text, and an empty line.

    Control words in the name or the text are tokenized as ordinary text.

    Raises:
        InvalidArgumentError: the tokenizer turns other words into control tokens.
    """
    return content_ids(tokenizer, f"===== {name} =====\n{text}\n\n")


def question_ids(tokenizer: Any, question: str, answer_start: str = "") -> list[int]:
    """Tokenize everything after the last document: the question and the beginning of the answer.

    Without a chat template, the question follows the word "Question:", and "Answer:" follows it.
    Control words in the question and in the answer are tokenized as ordinary text.

    Raises:
        InvalidArgumentError: the chat template does not repeat the text of the user, or the
            tokenizer turns other words into control tokens.
    """
    if tokenizer.chat_template:
        behind = _around(tokenizer, quoted(tokenizer, question))[1]
        return _ids(tokenizer, behind + quoted(tokenizer, answer_start))
    start = f" {answer_start}" if answer_start else ""
    return content_ids(tokenizer, f"Question: {question}\nAnswer:{start}")


def fingerprint_of(tokenizer: Any) -> str:
    """Return the hexadecimal SHA-256 digest of a tokenizer and its chat template.

    It depends on the template, the number of tokens, and the tokens of a short sample text, so two
    tokenizers that differ elsewhere may have the same digest.

    Raises:
        InvalidArgumentError: the tokenizer turns words of the sample into control tokens.
    """
    ids = _ids(tokenizer, _SAMPLE)
    identity = json.dumps([tokenizer.chat_template, len(tokenizer), ids], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()


def _around(tokenizer: Any, question: str) -> tuple[str, str]:
    """Return the text that a chat template writes before the documents, and the text after them.

    The second text contains the question.

    Raises:
        InvalidArgumentError: the chat template does not repeat the text of the user.
    """
    turn = {"role": "user", "content": _DOCUMENTS + question}
    text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    before, found, behind = text.partition(_DOCUMENTS)
    if not found:
        raise wrong(
            "tokenizer",
            "the chat template of the tokenizer does not contain the text of the user",
            "Set tokenizer.chat_template to None or to a different template",
        )
    return before, behind


def _ids(tokenizer: Any, written: str) -> list[int]:
    """Tokenize the text that a chat template has written with `quoted` content.

    Raises:
        InvalidArgumentError: the tokenizer turns other than control words into control tokens.
    """
    return tokenized(tokenizer, *unquoted(written))[0]
