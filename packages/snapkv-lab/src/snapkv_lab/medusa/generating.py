"""Medusa: heads draft several tokens ahead, and one forward pass verifies a tree of drafts.

Cai et al. (2024), https://arxiv.org/abs/2401.10774. It runs inside transformers' `generate` as its
`custom_generate`, so prompts, limits, stopping, logits processors and streaming are those of
`generate`. A compressed cache has two counters: how many tokens the text has, from which positions
are counted, and how many slots a layer stores, which only the layer itself uses.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TextStreamer

from snapkv.errors import CacheMismatchError, InvalidTypeError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import cache_among, passed
from snapkv.hf.forward_context import branching
from snapkv_lab.medusa.heads import LastStates, MedusaHeads, record_last_states
from snapkv_lab.medusa.masks import TreeBranches
from snapkv_lab.medusa.tree import (
    DELTA,
    EPSILON,
    CandidateTree,
    accept_greedily,
    accept_typically,
)
from snapkv_lab.medusa.verifying import (
    GenerateRequest,
    Tally,
    begin_verifying,
    cut_at_stop,
    fast_few_rows,
    require_one_sequence,
)

FLOAT32_NODES_ON_CPU, NODES_ON_CPU, NODES_ON_GPU = 3, 6, 63
"""The candidates per step: each one takes time on a CPU, and hardly any on a GPU."""


class Medusa:
    """Generates text with Medusa heads: ``model.generate(..., custom_generate=Medusa(heads))``.

    Greedy text equals that of plain decoding on the same cache. With ``do_sample`` drafts are
    accepted if they are plausible (`accept_typically`), and the text is not a sample of the model's
    distribution.

    Args:
        heads: the heads of the model, see `load_heads`.
        tree: which candidates are tried. By default these are the ones most likely to be right: 3
            on a CPU in float32, 6 on a CPU in narrower types, and 63 on a GPU. The tree is cut to
            the number of heads.
        epsilon: see `accept_typically`.
        delta: see `accept_typically`.

    Attributes:
        tally: the counts of the last text.

    Raises:
        InvalidTypeError: `heads` or `tree` has another type.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        tree: CandidateTree | None = None,
        *,
        epsilon: float = EPSILON,
        delta: float = DELTA,
    ) -> None:
        """Check the types of the arguments and choose the default tree.

        Raises:
            InvalidTypeError: `heads` or `tree` has another type.
        """
        if not isinstance(heads, MedusaHeads):
            problem = f"expected MedusaHeads, but got {type(heads).__name__}"
            raise wrong(
                "heads",
                problem,
                "Use load_heads(folder, model) to load the heads",
                InvalidTypeError,
            )
        if not isinstance(tree, CandidateTree | None):
            problem = f"expected a CandidateTree or None, but got {type(tree).__name__}"
            raise wrong("tree", problem, "For example, use CandidateTree(paths)", InvalidTypeError)
        if tree is None:
            weights = heads.weights
            nodes = NODES_ON_GPU
            if weights.device.type == "cpu":
                wide = weights.dtype == torch.float32
                nodes = FLOAT32_NODES_ON_CPU if wide else NODES_ON_CPU
            tree = CandidateTree.likeliest(heads.accuracies, nodes)
        self.heads = heads
        self.tree = tree.pruned(heads.num_heads)
        self.epsilon, self.delta = epsilon, delta
        self.tally = Tally()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        streamer: TextStreamer | None = None,
        **model_inputs: Any,
    ) -> Tensor:
        """Generate text after a prompt. This method is called by `generate`.

        The cache gets all tokens of the text except the last, and `tally` is replaced.

        Returns:
            (1, T + new tokens) int64, the prompt and the text.

        Raises:
            InvalidArgumentError: there are several sequences, padding, beams or no token ids, an
                output is wanted that only plain decoding gives, an option of the cache does not
                work with drafts, or the call is inside a `SharedReading`.
            CacheMismatchError: the cache is not a `CompressedCache`, or has seen the whole prompt.
            UnsupportedModelError: a layer of the cache cannot remove tokens.
        """
        require_one_sequence(input_ids, model_inputs.get("attention_mask"), generation_config)
        cache = cache_among(model_inputs)
        if not isinstance(cache, CompressedCache):
            problem = f"drafts need a CompressedCache, but got {type(cache).__name__}"
            remedy = "Use CompressedCache(model, FullCache()) to keep all tokens"
            raise wrong("cache", problem, remedy, CacheMismatchError)
        cache.setup.require("drafts")
        request = GenerateRequest(
            model=model,
            cache=cache,
            ids=input_ids,
            samples=generation_config.do_sample,
            processors=logits_processor,
            limit=generation_config.max_length,
            chunk_tokens=generation_config.prefill_chunk_size,
        )
        text = input_ids
        for tokens in self._steps(request, stopping_criteria):
            text = torch.cat([text, tokens[None]], dim=1)
            if streamer is not None:
                streamer.put(tokens.cpu())
        cache.prompt_state.record_text(text)
        if streamer is not None:
            streamer.end()
        return text

    def _steps(self, request: GenerateRequest, stopping_criteria: Any) -> Iterator[Tensor]:
        """Yield the new tokens of each step, (tokens,) int64 with at least one token, until the
        text ends. The first step gives one token and verifies nothing. `tally` is replaced and then
        updated in every step.
        """
        self.tally = tally = Tally()
        with fast_few_rows(request.model), record_last_states(request.model) as states:
            candidates = _Candidates(request, self, states)
            text = request.ids[0]
            first = request.choose(request.processed(text, candidates.start()))
            tokens, done = cut_at_stop(text, [first], stopping_criteria)
            tally.new_tokens = 1
            yield tokens
            text = torch.cat([text, tokens])
            while not done:
                verified, drafted = candidates.verify(text, request.limit - len(text) - 1)
                tokens, done = cut_at_stop(text, verified, stopping_criteria)
                candidates.keep(len(tokens))
                text = torch.cat([text, tokens])
                tally.passes += 1
                tally.new_tokens += len(tokens)
                tally.drafted += drafted
                tally.accepted += min(len(tokens), len(verified) - 1)
                yield tokens

    def accept(
        self, tree: CandidateTree, tokens: Tensor, logits: Tensor, *, samples: bool
    ) -> list[int]:
        """Return the nodes on the path of the tree that is accepted.

        Args:
            tree: the candidates.
            tokens: (nodes,) int64, the candidate in every node.
            logits: (nodes, V), the logits after every node, for V tokens of the vocabulary.
            samples: whether `generate` samples. If not, a candidate is accepted only if it is the
                most likely token.

        Returns:
            The numbers of the nodes, root first. If no draft is accepted, it is the root alone.
        """
        if not samples:
            return accept_greedily(tree.paths, tokens.cpu(), logits.argmax(dim=-1).cpu())
        return accept_typically(
            tree.paths.to(tokens.device),
            tokens,
            logits.float().softmax(dim=-1),
            epsilon=self.epsilon,
            delta=self.delta,
        )


class _Candidates:
    """The candidates for the next tokens of a text."""

    def __init__(self, request: GenerateRequest, medusa: Medusa, states: LastStates) -> None:
        self._request, self._medusa, self._states = request, medusa, states
        self._path: list[int] = []  # the nodes that the last step accepted, root first
        self._nodes = 0
        self._hidden: Tensor

    def start(self) -> Tensor:
        """Read the prompt and return the logits for the first token. It must be called first, and
        only once.

        Returns:
            (V,), for the V tokens of the vocabulary, before the logits processors.

        Raises:
            CacheMismatchError: the cache has seen the whole prompt.
            UnsupportedModelError: a layer of the cache cannot remove tokens.
            InvalidArgumentError: the last state of the model was not recorded, inside a
                `SharedReading`.
        """
        logits = self._request.read_prompt()
        if not hasattr(self._states, "value"):
            problem = "the heads cannot see the model's last state inside a SharedReading"
            raise wrong("custom_generate", problem, "Call generate outside of the SharedReading")
        self._hidden = self._states.value[0, -1]
        begin_verifying(self._request.cache)
        return logits

    def verify(self, text: Tensor, most_drafts: int) -> tuple[list[int], int]:
        """Draft several tokens and verify them with a single forward pass.

        Afterwards the cache stores all candidates. The caller must call `keep` before the next
        step.

        Args:
            text: (tokens,) int64, the prompt and the text so far, whose last token the cache has
                not seen.
            most_drafts: how many positions ahead may be drafted; 0 drafts nothing.

        Returns:
            A list of the accepted drafts and the token that the model chooses after them, and the
            number of drafts that were verified.
        """
        tree = self._medusa.tree.pruned(min(most_drafts, self._medusa.tree.depth))
        tokens = self._candidates(text, tree)
        logits = self._read(tokens, tree, len(text) - 1)
        if len(self._request.processors):
            logits = self._processed(text, tokens, tree, logits)
        self._nodes = len(tokens)
        self._path = self._medusa.accept(tree, tokens, logits, samples=self._request.samples)
        last = self._path[-1]
        self._hidden = self._states.value[0, last]
        accepted = tokens[self._path[1:]].tolist()
        following = self._request.choose(logits[last].float())
        return [*accepted, following], len(tokens) - 1

    def keep(self, tokens: int) -> None:
        """Remove from the cache all tokens of the last pass that are not in the text.

        Args:
            tokens: how many of the tokens that `verify` returned last are now in the text, at least
                1.
        """
        self._request.cache.keep_among_last(self._nodes, torch.tensor(self._path[:tokens]))

    def _candidates(self, text: Tensor, tree: CandidateTree) -> Tensor:
        """Draft the token in each node of the tree with the heads.

        Returns:
            (nodes,) int64; the root has the text's last token.
        """
        if not tree.choices:
            return text[-1:]
        guesses = self._medusa.heads.guesses(self._hidden)
        flat = torch.cat([text[-1:], guesses.flatten().to(text.device)])
        return flat[tree.picks.to(text.device)]

    def _read(self, tokens: Tensor, tree: CandidateTree, seen_tokens: int) -> Tensor:
        """Read all nodes into the cache in one pass, and return the logits after each of them.

        Args:
            tokens: (nodes,) int64, the token in every node.
            tree: the tree.
            seen_tokens: the position of the root in the text.

        Returns:
            (nodes, V), for the V tokens of the vocabulary, before the logits processors.
        """
        device = tokens.device
        reading: Any = contextlib.nullcontext()
        if not tree.is_chain:
            reading = branching(TreeBranches(tree.visible.to(device)))
        with reading:
            output = self._request.model(
                tokens[None],
                position_ids=(seen_tokens + tree.depths.to(device))[None],
                **passed(self._request.cache),
                use_cache=True,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _processed(
        self, text: Tensor, tokens: Tensor, tree: CandidateTree, logits: Tensor
    ) -> Tensor:
        """Return the logits after they have been changed by the logits processors. For every node,
        the processors see the text with the path to this node.

        Args:
            text: (tokens,) int64, the text up to the root.
            tokens: (nodes,) int64, the token in every node.
            tree: the tree.
            logits: (nodes, V), the logits after every node.

        Returns:
            (nodes, V) float32.
        """
        rows = []
        for node, seen in enumerate(tree.visible):
            path = tokens[seen.nonzero()[1:, 0].to(tokens.device)]
            rows.append(self._request.processed(torch.cat([text, path]), logits[node]))
        return torch.stack(rows)
