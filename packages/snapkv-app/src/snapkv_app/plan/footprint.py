"""Compute the bytes and operations of a model from the settings in its `config.json`.

This file imports neither torch nor transformers. `tests/plan` compares the results with the models
that transformers builds from the same settings, and with the caches that they fill.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.validation import require_choice

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PACKED_BYTES = {"mxfp4": 17 / 32, "fp8": 1 + 4 / 128**2}
"""Bytes of one number in a quantized checkpoint, scales included.

mxfp4 stores 32 numbers in four bits each and their common scale in eight (OCP Microscaling Formats,
section 5), of experts only. fp8 has one scale in float32 per block of 128 x 128 numbers, of all
matrices but the embedding and the output projection.
"""

_PERIODS = {  # family: the setting that says so, and how many layers have one full layer, the last
    "gemma2": ("", 2),
    "gemma3_text": ("sliding_window_pattern", 6),
    "cohere2": ("sliding_window_pattern", 4),
    "gpt_oss": ("", 2),
    "qwen3_next": ("full_attention_interval", 4),
    "qwen3_5_text": ("full_attention_interval", 4),
    "qwen3_5_moe_text": ("full_attention_interval", 4),
    "llama4_text": ("no_rope_layer_interval", 4),
}
_GATED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families with linear attention whose queries have a gate of the same size."""

_OWN_HEAD_DIM = {
    "glm4",
    "qwen3",
    "qwen3_moe",
    "ministral3",
    "minimax_m2",
    *_PERIODS,
} - {"cohere2"}
"""Families whose heads have a size of their own, which a file must therefore contain."""

FAMILIES = {
    *_PERIODS,
    *_OWN_HEAD_DIM,
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "phi3",
        "granite",
        "olmo2",
        "cohere",
        "smollm3",
        "glm4_moe",
    ),
    *("deepseek_v2", "deepseek_v3", "kimi_linear"),
}
"""The `model_type` of the models whose sizes are known here."""

_KINDS = ("full_attention", "sliding_attention", "linear_attention")

_WINDOW = "sliding_window"


class MissingSettingError(UnsupportedModelError):
    """A `config.json` has no value for a setting for which transformers has a default."""


@dataclass(frozen=True, kw_only=True)
class SlidingLayer:
    """A sliding-window layer, which stores only the last tokens, in a compressed cache as well."""

    token_bytes: int  # of one stored token
    most_tokens: int  # the most tokens stored between two passes


@dataclass(frozen=True, kw_only=True)
class FullLayer:
    """A full-attention layer, which can be compressed."""

    token_bytes: int  # of one stored token
    heads: int  # the number of heads whose keys and values are stored
    key_width: int  # the numbers of a token's key in one head
    value_width: int  # the numbers of a token's value in one head


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes and floating-point operations of a model, for any prompt."""

    weights_bytes: int  # as in the checkpoint; shared weights count once
    embedding_bytes: int  # a step reads one row of it; 0 if shared with the output projection
    expert_bytes: int
    experts: int  # per layer; 0 without experts
    experts_per_token: int
    full_layers: tuple[FullLayer, ...]
    sliding_layers: tuple[SlidingLayer, ...]
    other_layers: int  # layers with a state of fixed size
    state_bytes: int  # of these
    mlp_token_bytes: int  # activations of a prompt token at the widest point of an MLP
    attention_token_bytes: int  # and at attention
    hidden_token_bytes: int  # hidden state of one token
    pair_flops: int  # attention of one query-key pair, sum over full layers
    token_flops: int  # all matrices for one token
    max_positions: int | None
    dtype: str
    quantization: str | None = None  # of the checkpoint's weights; None if stored in `dtype`

    @property
    def token_bytes(self) -> int:
        """The bytes of one stored token in all full-attention layers together."""
        return sum(layer.token_bytes for layer in self.full_layers)

    @property
    def layer_token_bytes(self) -> int:
        """The bytes of one stored token in the layer where they are largest."""
        layers: list[FullLayer | SlidingLayer] = [*self.full_layers, *self.sliding_layers]
        return max((layer.token_bytes for layer in layers), default=0)

    @property
    def layers(self) -> int:
        """The number of all layers, including those with a state of fixed size."""
        return len(self.full_layers) + len(self.sliding_layers) + self.other_layers

    def cache_bytes(self, stored_tokens: int, seen_tokens: int) -> int:
        """Return the bytes of the cache of one request.

        Args:
            stored_tokens: the number of tokens in every full-attention layer.
            seen_tokens: the number of all tokens, from which sliding layers store the last ones.
        """
        return self.token_bytes * stored_tokens + self.other_bytes(seen_tokens)

    def other_bytes(self, seen_tokens: int, behind: int = 0) -> int:
        """Return the bytes of sliding windows and fixed states, which are never compressed.

        The arguments are those of `sliding_bytes`.
        """
        return self.sliding_bytes(seen_tokens, behind) + self.state_bytes

    def sliding_bytes(self, seen_tokens: int, behind: int = 0) -> int:
        """Return the bytes of the sliding layers of one request.

        Args:
            seen_tokens: the number of tokens that the model has read.
            behind: the number of tokens that are still stored although they have left the window.
        """
        return sum(
            layer.token_bytes * min(layer.most_tokens + behind, seen_tokens)
            for layer in self.sliding_layers
        )

    def read_bytes(self, batch: int) -> int:
        """Return the bytes of the weights that a decode step of a batch is expected to read.

        Of the experts, it only reads those that some token of the batch uses, if every token uses
        random ones. The embedding is not counted, unless it is also the output projection.
        """
        read = self.weights_bytes - self.embedding_bytes
        if not self.experts:
            return read
        unvisited = (1 - self.experts_per_token / self.experts) ** batch
        return read - int(self.expert_bytes * unvisited)

    def prompt_flops(self, tokens: int) -> int:
        """Return the floating-point operations of reading one prompt of `tokens` tokens.

        They are those of all matrices, and of attention in the full-attention layers, with half of
        all pairs of tokens. Attention in sliding-window layers and the state updates of other
        layers are left out.
        """
        return self.token_flops * tokens + self.pair_flops * tokens**2 // 2  # half of all pairs


def footprint_of(
    config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    parameters: int | None = None,
    weights_bytes: int | None = None,
) -> Footprint:
    """Compute the footprint of a model from the settings in its `config.json`.

    Args:
        config: the settings; those of the language model may be in its `text_config`.
        dtype: the dtype in which weights and caches are counted, a key of `ITEM_BYTES`, even if the
            weights are quantized. None for the dtype in `config`, with quantized weights as they
            are stored.
        parameters: the number of parameters of the checkpoint. By default it is computed without
            norms and biases, which are less than 0.2 % of a model of published size.
        weights_bytes: the bytes of the weights in the checkpoint; ignored if `dtype` is passed. By
            default they are computed from the settings.

    Raises:
        InvalidArgumentError: `dtype` is not a key of `ITEM_BYTES`.
        MissingSettingError: `config` has no value for a setting that this family needs.
        UnsupportedModelError: the family is not in `FAMILIES`, or `config` has a layer of an
            unknown kind or an unknown dtype.
    """
    text = _language_model(config)
    stored = dtype or _dtype(config, text)
    require_choice("dtype", stored, tuple(ITEM_BYTES))
    size = ITEM_BYTES[stored]
    packing = config.get("quantization_config") or text.get("quantization_config")
    quantization = None if dtype or not packing else str(packing.get("quant_method"))
    kinds, attention, mlp = _kinds(text), _attention(text), _mlp(text)
    full, sliding, linear = map(kinds.count, _KINDS)
    hidden, embedding = text["hidden_size"], text["vocab_size"] * text["hidden_size"]
    untied = 0 if text["tie_word_embeddings"] else embedding
    state_bytes, linear_numbers = _linear(text, size) if linear else (0, 0)
    matrices = attention.numbers * (full + sliding) + linear_numbers * linear + mlp.numbers
    numbers = parameters or embedding + untied + matrices
    packed = PACKED_BYTES.get(quantization or "", size)
    if weights_bytes is None or dtype:
        whole = mlp.expert_numbers if quantization == "mxfp4" else matrices
        weights_bytes = int(whole * packed) + (numbers - whole) * size
    elif not is_counted(quantization):
        packed = weights_bytes / numbers
    idle = mlp.expert_numbers * (mlp.experts - mlp.chosen) // (mlp.experts or 1)
    token_bytes = attention.heads * (attention.key_width + attention.value_width) * size
    widths = {name: getattr(attention, name) for name in ("heads", "key_width", "value_width")}
    window = 0
    if sliding:
        window = text["attention_chunk_size" if text["model_type"] == "llama4_text" else _WINDOW]
    sliding_layer = SlidingLayer(token_bytes=token_bytes, most_tokens=window - 1)
    return Footprint(
        weights_bytes=weights_bytes,
        embedding_bytes=untied * size,
        expert_bytes=int(mlp.expert_numbers * packed),
        experts=mlp.experts,
        experts_per_token=mlp.chosen,
        full_layers=(FullLayer(token_bytes=token_bytes, **widths),) * full,
        sliding_layers=(sliding_layer,) * sliding,
        other_layers=linear,
        state_bytes=linear * state_bytes,
        mlp_token_bytes=(4 * hidden + 3 * mlp.width) * size,
        attention_token_bytes=(4 * hidden + attention.activations) * size,
        hidden_token_bytes=hidden * size,
        pair_flops=2 * attention.states * full,
        token_flops=2 * (numbers - untied - idle),
        max_positions=text.get("model_max_length") or text.get("max_position_embeddings"),
        dtype=stored,
        quantization=quantization,
    )


def is_counted(quantization: str | None) -> bool:
    """Return whether the bytes of weights with this quantization are known.

    If not, the weights are counted in the dtype of the model.
    """
    return quantization is None or quantization in PACKED_BYTES


class _Text(dict[str, Any]):
    """The settings of a language model by name; looking up a missing one raises an error."""

    def __missing__(self, name: str) -> Any:
        """Raise the error for a setting that is missing.

        Raises:
            MissingSettingError: always.
        """
        raise wrong(
            "model",
            f"the config.json of the model has no {name}, which is needed for models of the "
            f"family {self.get('model_type')}",
            "Add this setting to the config.json of the model",
            MissingSettingError,
        )


def _language_model(config: Mapping[str, Any]) -> _Text:
    """Return the settings of the language model in a `config.json`, in `text_config` if it has one.

    Raises:
        UnsupportedModelError: its family is not in `FAMILIES`.
    """
    text = _Text(config.get("text_config") or config)
    if (family := text.get("model_type")) not in FAMILIES:
        raise wrong(
            "model",
            f"the sizes of models of the family {family!r} are not known. The known families are "
            f"{', '.join(sorted(FAMILIES))}",
            "Load the model, read a prompt, and look at cache.report()",
            UnsupportedModelError,
        )
    return text


def _dtype(config: Mapping[str, Any], text: _Text) -> str:
    """Return the dtype of a model by its name in torch; float32 if the settings name none.

    Raises:
        UnsupportedModelError: the sizes of that dtype are not known.
    """
    found = (each.get(name) for each in (text, config) for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, found), "float32")).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise wrong(
            "model",
            f"expected one of the dtypes {', '.join(ITEM_BYTES)} in the config.json of the model, "
            f"but got {dtype!r}",
            "Set the dtype as an argument",
            UnsupportedModelError,
        )
    return dtype


def _kinds(text: _Text) -> list[str]:
    """Return the kind of attention of every layer, in order.

    It is "full_attention", "sliding_attention", which includes chunked attention, or
    "linear_attention".

    Raises:
        MissingSettingError: a setting that tells the kinds is missing.
        UnsupportedModelError: a layer has attention of another kind.
    """
    listed = text.get("layer_types") or [
        _kind(text, layer) for layer in range(text["num_hidden_layers"])
    ]
    kinds = [kind.replace("chunked", "sliding") for kind in listed]
    if unknown := set(kinds) - set(_KINDS):
        raise wrong(
            "model",
            "expected layers of full, sliding, chunked or linear attention, but got "
            f"{', '.join(sorted(unknown))}",
            "Load the model, read a prompt, and look at cache.report()",
            UnsupportedModelError,
        )
    return kinds


def _kind(text: _Text, layer: int) -> str:
    """Return the kind of attention of one layer, for a model whose settings do not list them.

    Raises:
        MissingSettingError: a setting that tells the kind is missing.
    """
    family = text["model_type"]
    if family in _PERIODS:
        setting, period = _PERIODS[family]
        is_full = (layer + 1) % (text.get(setting) or period) == 0
    elif family.startswith("qwen"):
        is_full = not text.get("use_sliding_window") or layer < text["max_window_layers"]
    else:
        is_full = not (text[_WINDOW] if family == "mistral" else text.get(_WINDOW))
    return _KINDS[0 if is_full else 2 if family in _GATED else 1]


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """The sizes of an attention layer with full or sliding attention.

    Attributes:
        heads: the number of heads whose keys and values are stored.
        key_width: how many numbers a key has.
        value_width: how many numbers a value has.
        states: how many numbers the queries and the attention output of one token have.
        activations: how many numbers one token has at the widest point of the layer.
        numbers: how many numbers the matrices of the layer have.
    """

    heads: int
    key_width: int
    value_width: int
    states: int
    activations: int
    numbers: int


def _attention(text: _Text) -> _Attention:
    """Compute the sizes of a layer with full or sliding attention from the settings.

    Latent attention counts as one head, whose key is the latent and whose value is the rotated part
    of the key.

    Raises:
        MissingSettingError: a setting is missing.
    """
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    if rank := text.get("kv_lora_rank"):  # one latent of all heads is stored
        nope, rope, value = (text[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
        queries, asked = heads * (nope + rope), text["q_lora_rank"]
        asking = asked * (hidden + queries) if asked else hidden * queries
        above = rank * heads * (nope + value)
        return _Attention(
            heads=1,
            key_width=rank,
            value_width=rope,
            states=queries + heads * value,
            activations=2 * (queries + heads * value),  # keys and values are computed from it
            numbers=asking + hidden * (rank + rope) + above + heads * value * hidden,
        )
    width = text["head_dim"] if text["model_type"] in _OWN_HEAD_DIM else text.get("head_dim")
    width, stored = width or hidden // heads, text["num_key_value_heads"]
    gate = heads * width if text["model_type"] in _GATED else 0
    return _Attention(
        heads=stored,
        key_width=width,
        value_width=width,
        states=2 * heads * width,
        activations=2 * heads * width,
        numbers=hidden * (2 * heads * width + 2 * stored * width + gate),
    )


def _linear(text: _Text, size: int) -> tuple[int, int]:
    """Return the sizes of a layer with linear attention.

    The state of its attention is stored in float32, and the state of its convolution in the dtype
    of the model.

    Args:
        text: the settings.
        size: the bytes of one number in the dtype of the model.

    Returns:
        The bytes of both states, and how many numbers the matrices of the layer have.

    Raises:
        MissingSettingError: a setting is missing.
    """
    hidden = text["hidden_size"]
    if text["model_type"] == "kimi_linear":  # the two gates are of low rank
        width = text["linear_head_dim"]
        keys = values = text["linear_num_heads"] * width
        numbers = 4 * hidden * keys + 2 * width * (hidden + keys)
    else:
        width = text["linear_key_head_dim"]
        keys = text["linear_num_key_heads"] * width
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        numbers = hidden * (2 * keys + 3 * values)
    convolution = (2 * keys + values) * text["linear_conv_kernel_dim"]
    return values * width * ITEM_BYTES["float32"] + convolution * size, numbers


@dataclass(frozen=True, kw_only=True)
class _MLP:
    """The sizes of the MLPs of a model.

    Attributes:
        experts: the number of experts per layer; 0 without experts.
        chosen: the number of experts that a token uses.
        width: the inner width of an MLP, or the sum over all experts that a token uses.
        numbers: how many numbers the matrices of all layers have.
        expert_numbers: how many of these numbers belong to experts.
    """

    experts: int
    chosen: int
    width: int
    numbers: int
    expert_numbers: int


def _mlp(text: _Text) -> _MLP:
    """Compute the sizes of the MLPs from the settings; shared experts do not count as experts.

    Raises:
        MissingSettingError: a setting is missing.
    """
    hidden, layers, family = text["hidden_size"], text["num_hidden_layers"], text["model_type"]
    inner = 0 if family == "qwen3_5_moe_text" else text["intermediate_size"]
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if not (experts := next(filter(None, map(text.get, names)), 0)):
        numbers = 3 * hidden * inner * layers
        return _MLP(experts=0, chosen=0, width=inner, numbers=numbers, expert_numbers=0)
    chosen = text.get("num_experts_per_token") or text["num_experts_per_tok"]
    width = text.get("moe_intermediate_size") or inner
    shared = text.get("n_shared_experts") or text.get("num_shared_experts") or 0
    shared = text.get("shared_expert_intermediate_size") or shared * width
    dense, step = text.get("first_k_dense_replace") or 0, text.get("decoder_sparse_step") or 1
    sparse = layers // step - dense - len(text.get("mlp_only_layers") or ())
    if types := text.get("mlp_layer_types"):
        sparse = types.count("sparse")
    if family == "llama4_text":  # each layer of experts has one that all tokens visit
        sparse, shared = layers // text["interleave_moe_layer_step"], width
    each = 3 * hidden * width * experts
    around = hidden * (3 * shared + experts)
    plain = 3 * hidden * (text.get("intermediate_size_mlp") or inner) * (layers - sparse)
    return _MLP(
        experts=experts,
        chosen=chosen,
        width=max(width * chosen, inner if text.get("moe_intermediate_size") else 0),
        numbers=sparse * (each + around) + plain,
        expert_numbers=sparse * each,
    )
