"""Training of Medusa heads on a frozen model (Medusa-1, section 2.2.1).

Only the heads learn. They share the model's output projection, so 3 heads of a 135M model take 2
MB. The labels are the model's own answers to questions about documents (self-distillation, section
2.3.2). They are stored batch by batch, and a stopped run continues after the last batch. Head k at
position t learns the token at t + k + 1. The heads share no learned weights, and Adam does not
depend on the scale of a loss, so their losses are simply added.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from snapkv.errors import wrong
from snapkv.hf.cache_argument import passed
from snapkv_app.answering import end_token_ids, generate_options, until_end
from snapkv_app.models import LoadedModel
from snapkv_app.prompts import question_prompt
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import token_ids
from snapkv_lab.evaluate.store import Progress, Store, key_fields
from snapkv_lab.medusa.heads import (
    MedusaHeads,
    output_projection,
    record_last_states,
    save_heads,
    write_tensors,
)
from snapkv_lab.medusa.tree import HEAD_RANKS
from snapkv_lab.medusa_training import MedusaTraining
from snapkv_lab.rows import short_hash

STATE = "training.safetensors"

HELD_BYTES = 2**30
"""The model's states are kept between epochs up to this size, and are computed again beyond it."""

OTHER_TOKENS = 2048
"""The loss runs over the tokens of the answers and this many others, which each step draws
again.
"""

STEPS_PER_SAVE = 20
_NO_LABEL = -100


def train_heads(
    loaded: LoadedModel,
    texts: Sequence[str],
    folder: Path,
    plan: MedusaTraining,
    progress: Progress,
) -> MedusaHeads:
    """Train heads for a model, and write them with their accuracies on held-out answers.

    Args:
        loaded: the model and its tokenizer.
        texts: the documents that the answers are about.
        folder: where answers, state and heads are stored; a stopped run continues there.
        plan: the settings of the training.
        progress: receives the progress.

    Returns:
        The heads, with their measured accuracies.

    Raises:
        InvalidArgumentError: the documents are too short, or the folder holds another training.
        UnsupportedModelError: the model has no output projection.
        OutputError: a file cannot be written.
    """
    prompts = _make_prompts(loaded.tokenizer, texts, plan)
    run = {"model": loaded.name, "revision": loaded.revision, "training": asdict(plan)}
    with Store(folder, run | {"data": short_hash(prompts)}, fields=("answer",)) as store:
        exchanges = generate_answers(loaded, prompts, plan, store, progress)
    states = _States(loaded.model, exchanges)
    held_out = list(range(0, len(exchanges), 10))
    learnt = [place for place in range(len(exchanges)) if place % 10]
    heads = _Training(states, learnt, folder, plan).run(progress)
    heads.accuracies = measure_accuracies(heads, states, held_out, progress)
    save_heads(heads, folder, base_model=loaded.name, training=asdict(plan))
    return heads


QUESTIONS = (
    "What is this text about? Answer in a few sentences.",
    "Summarize the text above.",
    "Explain the most important part of the text step by step.",
    "Which facts does the text state? List them.",
    "Write a short introduction to the text for a beginner.",
    "Repeat the first paragraph of the text word for word.",
)
"""The questions about the passages, which are asked in turn."""


class Exchange(NamedTuple):
    """The token ids of a prompt and of the answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def generate_answers(
    loaded: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    plan: MedusaTraining,
    store: Store,
    progress: Progress,
) -> list[Exchange]:
    """Return the model's answers to all prompts, and generate those that the store lacks.

    New answers are added to the store batch by batch.

    Returns:
        One exchange for each prompt, in their order.

    Raises:
        OutputError: an answer cannot be stored; those of the batches before it are.
    """
    keys = [(str(number), "medusa", "answer") for number in range(len(prompts))]
    missing = [place for place, each in enumerate(keys) if each not in store]
    for start in range(0, len(missing), plan.batch):
        progress("answering", missing[start], plan.answers)
        part = missing[start : start + plan.batch]
        answered = _generate_batch(loaded, [prompts[place] for place in part], plan)
        for place, answer in zip(part, answered, strict=True):
            store.add(key_fields(keys[place]) | {"answer": answer})
    answers = (tuple(store[each]["answer"]) for each in keys)
    return [Exchange(*each) for each in zip(prompts, answers, strict=True)]


def _make_prompts(
    tokenizer: Any, texts: Sequence[str], plan: MedusaTraining
) -> list[tuple[int, ...]]:
    """Split the texts into passages, and return the token ids of prompts that ask a question about
    a passage.

    The passages are shuffled, and the first `plan.answers` are taken, with one prompt each. The end
    of a text that does not fill a passage is left out.

    Raises:
        InvalidArgumentError: the texts have fewer than `plan.answers` passages.
    """
    passages, length = [], plan.passage_tokens
    for text in texts:
        ids = token_ids(tokenizer, text)
        starts = range(0, len(ids) - length + 1, length)
        passages += [tokenizer.decode(ids[start : start + length]) for start in starts]
    if len(passages) < plan.answers:
        problem = (
            f"expected text for {plan.answers} passages of {length} tokens, but got {len(passages)}"
        )
        raise wrong("data", problem, "Use more documents, or use fewer answers")
    random.Random(plan.seed).shuffle(passages)
    pairs = zip(passages[: plan.answers], itertools.cycle(QUESTIONS), strict=False)
    prompts = (question_prompt(tokenizer, passage, question) for passage, question in pairs)
    return [tuple(prompt.token_ids(tokenizer)[0].tolist()) for prompt in prompts]


def _generate_batch(
    loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], plan: MedusaTraining
) -> list[tuple[int, ...]]:
    """Return the token ids of the model's greedy answers to the prompts, in their order. An answer
    ends with its end token, or has `plan.max_new_tokens` tokens.

    Args:
        loaded: the model and its tokenizer.
        prompts: the token ids of each prompt, at least one; they are read together.
        plan: the settings of the training.
    """
    model, longest = loaded.model, max(map(len, prompts))
    settings = GenerationSettings(max_new_tokens=plan.max_new_tokens)
    ends = end_token_ids(model, settings)
    padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = padded(rows, padding_value=next(iter(ends), 0))
    mask = padded([torch.ones_like(row) for row in rows])
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        **passed(DynamicCache(config=model.config.get_text_config(decoder=True))),
        **generate_options(model, settings),
    )
    return [until_end(row, ends) for row in output[:, longest:].tolist()]


class _States:
    """The hidden states of the model when it reads its own answers.

    They are computed when they are asked for, and kept in memory up to `HELD_BYTES`.

    Attributes:
        model: the model.
        tokens: (T,) int64, the different tokens of all answers in ascending order.
    """

    def __init__(self, model: Any, exchanges: Sequence[Exchange]) -> None:
        self.model, self._exchanges = model, exchanges
        self._held: dict[int, Tensor] = {}
        self._held_bytes = 0
        seen = {token for exchange in exchanges for token in exchange.answer}
        self.tokens = torch.tensor(sorted(seen), device=model.device)

    @torch.no_grad()
    def states_before(self, place: int) -> Tensor:
        """Return the hidden states from which the model predicts each token of an answer.

        Args:
            place: the number of the exchange.

        Returns:
            (N, d) float32, for the N tokens of the answer and hidden states of size d. The result
            may be kept here and returned again, so the caller must not change it.
        """
        if place in self._held:
            return self._held[place]
        exchange = self._exchanges[place]
        ids = torch.tensor([[*exchange.prompt, *exchange.answer[:-1]]], device=self.model.device)
        with record_last_states(self.model) as states:
            self.model(ids, use_cache=False, logits_to_keep=len(exchange.answer))
        before = states.value[0].float()
        if self._held_bytes + before.nbytes <= HELD_BYTES:
            self._held[place] = before
            self._held_bytes += before.nbytes
        return before

    def pairs(self, places: Sequence[int], num_heads: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the labels for the given answers.

        The state before token i predicts that token, and head k, counted from 0, predicts the token
        k + 1 positions after it.

        Args:
            places: the numbers of the exchanges.
            num_heads: the number of heads.

        Returns:
            (N, d) float32 states and (N, heads) int64 labels, which are -100 after the end of an
            answer. N is the number of tokens in all of these answers together.
        """
        states, labels = [], []
        for place in places:
            answer = torch.tensor(self._exchanges[place].answer, device=self.model.device)
            padded = torch.nn.functional.pad(answer, (0, num_heads), value=_NO_LABEL)
            states.append(self.states_before(place))
            labels.append(padded.unfold(0, num_heads + 1, 1)[:, 1:])
        return torch.cat(states), torch.cat(labels)


class _Training:
    """The steps of a training. Its state is saved regularly, so that the next run can continue."""

    def __init__(
        self, states: _States, places: Sequence[int], folder: Path, plan: MedusaTraining
    ) -> None:
        self._states, self._places, self._plan = states, places, plan
        self._path = folder / STATE
        self._heads = MedusaHeads.untrained(states.model, plan.num_heads)
        self._learning = {"weights": self._heads.weights, "biases": self._heads.biases}
        for parameter in self._learning.values():
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            self._learning.values(), lr=plan.learning_rate, weight_decay=0.0
        )
        self._total = plan.epochs * math.ceil(len(places) / plan.step_answers)

    def run(self, progress: Progress) -> MedusaHeads:
        """Run the training steps after the saved one, and return the heads without gradients.

        The state is saved every `STEPS_PER_SAVE` steps and after the last one.

        Raises:
            OutputError: the state cannot be written.
        """
        start = self._resume()
        for step, batch in enumerate(self._batches()):
            if step < start:
                continue
            progress("training", step, self._total)
            self._learn(step, batch)
            if (step + 1) % STEPS_PER_SAVE == 0 or step + 1 == self._total:
                self._save(step + 1)
        return self._heads.requires_grad_(False)

    def _batches(self) -> Iterator[list[int]]:
        """Yield the numbers of the answers for each step, epoch by epoch. Equal plans give equal
        batches, so that a stopped training can skip the steps that are done.
        """
        for epoch in range(self._plan.epochs):
            generator = torch.Generator().manual_seed(self._plan.seed + epoch)
            order = torch.randperm(len(self._places), generator=generator)
            for batch in torch.split(order, self._plan.step_answers):
                yield [self._places[at] for at in batch.tolist()]

    def _learn(self, step: int, batch: list[int]) -> None:
        """Run one training step, which changes the heads and the optimizer in place.

        Args:
            step: the number of the step, from 0, which decides the learning rate and the random
                tokens of the loss.
            batch: the numbers of the answers to learn from.
        """
        hidden, labels = self._states.pairs(batch, self._plan.num_heads)
        tokens = self._tokens(step)
        place = torch.full((int(tokens.max()) + 1,), _NO_LABEL, device=tokens.device)
        place[tokens] = torch.arange(len(tokens), device=tokens.device)
        targets = torch.where(labels >= 0, place[labels.clamp(min=0)], _NO_LABEL)
        projection = output_projection(self._states.model)
        rows = projection.weight[tokens].float()
        bias = None if projection.bias is None else projection.bias[tokens].float()
        loss = hidden.new_zeros((), dtype=torch.float32)
        for head, states in enumerate(self._heads.states(hidden).unbind(dim=-2)):
            logits = torch.nn.functional.linear(states, rows, bias)
            loss = loss + torch.nn.functional.cross_entropy(logits, targets[:, head])
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * self._rate(step)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()

    def _rate(self, step: int) -> float:
        """Return the factor, from 0 to 1, by which the learning rate is multiplied in the given
        step, counted from 0. It rises over the first tenth of the steps, and then falls as a
        cosine.
        """
        warm = max(1, self._total // 10)
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self._total - warm)))

    def _tokens(self, step: int) -> Tensor:
        """Return the tokens over which the loss of the given step is computed: those of all
        answers, and up to `OTHER_TOKENS` random ones, which only the seed and the step decide.

        Returns:
            (tokens,) int64, all different and in ascending order.
        """
        seen, V = self._states.tokens, output_projection(self._states.model).weight.shape[0]
        generator = torch.Generator().manual_seed(self._plan.seed + step)
        others = torch.randint(0, V, (OTHER_TOKENS,), generator=generator)
        tokens: Tensor = torch.unique(torch.cat([seen, others.to(seen.device)]))
        return tokens

    def _save(self, step: int) -> None:
        """Save the heads and the state of the optimizer after `step` steps, in place of the former
        file.

        Raises:
            OutputError: the file cannot be written.
        """
        tensors = {name: tensor.detach() for name, tensor in self._learning.items()}
        for name, parameter in self._learning.items():
            for kind, value in self._optimizer.state[parameter].items():
                tensors[f"{name}.{kind}"] = value
        write_tensors(tensors, self._path, {"step": str(step)})

    def _resume(self) -> int:
        """Load the saved state of heads and optimizer, if there is one.

        Returns:
            The number of steps that are done; 0 without a saved state.
        """
        if not self._path.exists():
            return 0
        with safe_open(self._path, framework="pt") as file:
            for name, parameter in self._learning.items():
                parameter.data.copy_(file.get_tensor(name))
                kinds = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 # no mapping
                state = {key.removeprefix(f"{name}."): file.get_tensor(key) for key in kinds}
                self._optimizer.state[parameter] = {  # Adam counts its steps on the CPU
                    kind: tensor if kind == "step" else tensor.to(parameter.device)
                    for kind, tensor in state.items()
                }
            return int(file.metadata()["step"])


@torch.no_grad()
def measure_accuracies(
    heads: MedusaHeads, states: _States, places: Sequence[int], progress: Progress
) -> tuple[tuple[float, ...], ...]:
    """Measure how often the guesses of each head are right on the given answers.

    Args:
        heads: the heads.
        states: the hidden states of the model on all answers.
        places: the numbers of the answers.
        progress: receives the progress.

    Returns:
        For each head, the share of tokens for which its choice of each rank is right, from 0 to 1,
        for `HEAD_RANKS` ranks with the most likely first. All shares are 0 if the answers are too
        short for the head.
    """
    hits = heads.weights.new_zeros(heads.num_heads, HEAD_RANKS, dtype=torch.float32)
    counted = hits.new_zeros(heads.num_heads, 1)
    for number, place in enumerate(places):
        progress("measuring", number, len(places))
        hidden, labels = states.pairs([place], heads.num_heads)
        hits += (heads.guesses(hidden) == labels[..., None]).sum(dim=0)
        counted += (labels >= 0).sum(dim=0)[:, None]
    shares = (hits / counted.clamp(min=1)).tolist()
    return tuple(tuple(round(share, 4) for share in row) for row in shares)
