"""lm-eval's tasks, answered from compressed caches. Only this file needs the package lm-eval.

Generation goes through `snapkv_app.answering`. Where a task compares likelihoods, the context is
read and compressed once, and every continuation is scored over what was kept. Tasks that score
whole texts have no prompt to compress and are refused. Every answer is on the disk when it is
known, under a hash of the request, so that a run that was stopped can be continued.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from torch import Tensor

from snapkv.errors import DocumentError, InvalidArgumentError, OutputError, PromptTooLongError
from snapkv.validation import nearest, require_at_least
from snapkv_app.answering import answer, answers_together
from snapkv_app.control_words import quoted
from snapkv_app.likelihood import log_likelihoods
from snapkv_app.models import LoadedModel
from snapkv_app.prompts import Prompt
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import prepare_methods, require_same_policies
from snapkv_lab.evaluate.store import Key, Progress, RunSummary, Store
from snapkv_lab.measure.environment import software_versions
from snapkv_lab.rows import Row, short_hash

_ANSWER_TOKENS = 256
"""Where lm-eval cuts an answer off if a task does not say."""

_WITHOUT_EFFECT = frozenset({"top_p", "top_k", "min_p", "typical_p"})
"""Settings of the sampling, which change nothing where the most likely token is taken."""


@dataclass(frozen=True, kw_only=True)
class HarnessRun:
    """Tasks of lm-eval on a model, by several methods."""

    loaded: LoadedModel
    tasks: Sequence[str]
    methods: Sequence[Method]
    include_path: Path | None = None
    num_fewshot: int | None = None
    chat: bool = False
    limit: int | None = None
    batch_size: int = 1

    def __post_init__(self) -> None:
        require_at_least("batch_size", self.batch_size, 1)
        object.__setattr__(self, "methods", prepare_methods(self.loaded, self.methods))

    def evaluate(self, folder: Path, on_progress: Progress | None = None) -> RunSummary:
        """Answer what the folder does not hold yet; every metric of every task by every method.

        A row holds: task, version, method, policy, metric, filter, score (as lm-eval counts it) and
        samples.
        """
        manager = self._manager()
        found = []
        with Store(folder, self.description(), fields=("policy", "response")) as store:
            require_same_policies(self.methods, store.records)
            for method in self.methods:
                model = CompressedLM(
                    self.loaded,
                    method,
                    store,
                    chat=self.chat,
                    batch_size=self.batch_size,
                    on_progress=on_progress,
                )
                found += _rows(self._results(model, manager), method)
            return RunSummary.of(store, found)

    def fingerprint(self) -> str:
        return short_hash(self.description())

    def description(self) -> Row:
        """What a result must say so that it can be made again."""
        return {
            "tasks": list(self.tasks),
            "model": self.loaded.description(),
            "num_fewshot": self.num_fewshot,
            "template": "tokenizer" if self.chat else "none",
            "limit": self.limit,
            **software_versions(),
            "lm_eval": version("lm_eval"),
        }

    def _results(self, model: "CompressedLM", manager: Any) -> dict[str, Any]:
        try:
            results: dict[str, Any] = simple_evaluate(
                model=model,
                tasks=list(self.tasks),
                task_manager=manager,
                num_fewshot=self.num_fewshot,
                apply_chat_template=self.chat,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        except OutputError:
            raise  # of the folder of the answers
        except OSError as error:
            raise DocumentError(
                f"tasks: expected the data of {', '.join(self.tasks)}, got "
                f"{(str(error).splitlines() or [type(error).__name__])[0]!r}; run it where "
                "there is a network, or name a task with local data"
            ) from error
        return results

    def _manager(self) -> Any:
        """lm-eval's index of tasks; every name must be in it.

        Its own thousands are only read where a name is not a task of the user's folder.
        """
        if self.include_path is not None:
            own = TaskManager(include_path=self.include_path, include_defaults=False)
            if set(self.tasks) <= set(own.all_subtasks):
                return own
        manager = TaskManager(include_path=self.include_path)
        for name in self.tasks:
            if name not in manager.all_tasks:
                raise InvalidArgumentError(
                    f"tasks: expected tasks that lm-eval knows, got {name!r}"
                    f"{nearest(name, manager.all_tasks)}; --include-path adds a folder of your own"
                )
        return manager


class CompressedLM(LM):
    """A model as lm-eval asks it, with a cache that a policy compresses."""

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        store: Store,
        *,
        chat: bool = False,
        batch_size: int = 1,
        on_progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self._loaded, self._method, self._store = loaded, method, store
        self._chat, self._batch_size, self._on_progress = chat, batch_size, on_progress

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answer to every context, up to the first of the task's stop strings."""
        prompts = [self._prompt(request.args[0]) for request in requests]
        settings = [
            _settings(request.args[1], request.task_name, seed)
            for seed, request in enumerate(requests)
        ]
        for prompt, setting in zip(prompts, settings, strict=True):
            self._require_positions(self._ids(prompt).shape[1] + setting.max_new_tokens)
        keys = [
            self._key(request, [prompt.text, asdict(setting)])
            for request, prompt, setting in zip(requests, prompts, settings, strict=True)
        ]

        # Where the most likely token is taken, the seed has no meaning.
        alike = [each if each.temperature else replace(each, seed=0) for each in settings]

        def give(places: Sequence[int]) -> Iterator[str]:
            for start in range(0, len(places), self._batch_size):
                part = places[start : start + self._batch_size]
                yield from self._generated([prompts[place] for place in part], settings[part[0]])

        return self._responses(keys, alike, give)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """How likely every continuation is after its compressed context, and if it is greedy's."""
        pairs = [self._pair(*request.args) for request in requests]
        for request, (context, continuation) in zip(requests, pairs, strict=True):
            if not continuation.shape[1]:
                before, behind = request.args
                raise InvalidArgumentError(
                    f"tasks: expected continuations with a token of their own, got {behind!r} "
                    f"after {before[-20:]!r}, of which the tokenizer makes none; give the task a "
                    "target_delimiter that parts them"
                )
            self._require_positions(context.shape[1] + continuation.shape[1])

        def give(places: Sequence[int]) -> Iterator[tuple[float, bool]]:
            context, together = pairs[places[0]][0], [pairs[place][1] for place in places]
            how = self._method.policy, self._batch_size, self._method.bits
            return log_likelihoods(self._loaded, context, together, *how)

        keys = [self._key(request, list(request.args)) for request in requests]
        contexts = [context[0].tolist() for context, _ in pairs]
        return list(map(tuple, self._responses(keys, contexts, give)))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise InvalidArgumentError(
            f"tasks: expected tasks with a prompt, got {requests[0].task_name}, which scores whole "
            "texts (loglikelihood_rolling), of which there is nothing to compress; leave it out"
        )

    @property
    def tokenizer_name(self) -> str:
        """Under which lm-eval caches requests."""
        return str(self._loaded.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's; lm-eval asks for it where prompts are to be wrapped."""
        if not chat_template:
            return ""
        template = self._loaded.tokenizer.chat_template
        if not template:
            raise InvalidArgumentError(
                "template: expected a tokenizer with a chat template, got one without; use none"
            )
        return str(template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt, its special tokens in it, and its contents `quoted`."""
        tokenizer = self._loaded.tokenizer
        text: str = tokenizer.apply_chat_template(
            [turn | {"content": quoted(tokenizer, turn["content"])} for turn in chat_history],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _key(self, request: Instance, content: list[Any]) -> Key:
        """What a response is found by: where it is asked, and all that it depends on."""
        asked = [request.task_name, request.doc_id, request.idx]
        named = {"kind": request.request_type, "asked": asked, "content": content}
        name = "/".join(map(str, [*asked, short_hash(named, digits=16)]))
        return name, self._method.label, "visible"  # a task's question votes, as part of its prompt

    def _responses(
        self,
        keys: Sequence[Key],
        alike: Sequence[Any],
        give: Callable[[Sequence[int]], Iterable[Any]],
    ) -> list[Any]:
        """A response to every request; each is on the disk before the next one is computed.

        Requests in turn whose `alike` are equal are given together.
        """
        places = {key: place for place, key in enumerate(keys) if key not in self._store}

        def records() -> Iterator[Row]:
            for _, group in itertools.groupby(sorted(places.values()), alike.__getitem__):
                together = list(group)
                for place, response in zip(together, give(together), strict=True):
                    named = dict(zip(("sample", "method", "question"), keys[place], strict=True))
                    yield named | {"policy": self._method.describe(), "response": response}

        self._store.complete(keys, records(), self._on_progress)
        return [self._store[key]["response"] for key in keys]

    def _generated(self, prompts: Sequence[Prompt], settings: GenerationSettings) -> list[str]:
        policy, bits = self._method.policy, self._method.bits
        if len(prompts) > 1:
            return answers_together(self._loaded, prompts, policy, settings, bits)
        return [answer(self._loaded, prompts[0], policy, settings, quantize=bits).text]

    def _prompt(self, text: str) -> Prompt:
        return Prompt.written(text) if self._chat else Prompt(text=text)

    def _ids(self, prompt: Prompt) -> Tensor:
        ids: Tensor = prompt.token_ids(self._loaded.tokenizer).to(self._loaded.model.device)
        return ids

    def _pair(self, context: str, continuation: str) -> tuple[Tensor, Tensor]:
        """Token ids of both, (1, T), cut where lm-eval cuts them.

        Blanks at the context's end belong to the continuation, and the ids are those of both read
        as one text. An empty context is one token: that of a text's beginning, or else its end.
        """
        stripped = context.rstrip()
        if not stripped:
            tokenizer = self._loaded.tokenizer
            begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
            first = end if begin is None else begin
            nothing = Prompt(text="", has_special_tokens=True)
            ids = self._ids(nothing.followed_by(tokenizer, context + continuation))
            return ids.new_tensor([[first]]), ids
        whole = self._ids(self._prompt(context).followed_by(self._loaded.tokenizer, continuation))
        place = self._ids(self._prompt(stripped)).shape[1]
        return whole[:, :place], whole[:, place:]

    def _require_positions(self, tokens: int) -> None:
        most = self._loaded.max_tokens
        if most is not None and tokens > most:
            raise PromptTooLongError(
                f"tasks: expected prompts that the model has positions for, {most:,} with the "
                f"answer, got one that needs {tokens:,}; take fewer examples with --num-fewshot, "
                "or a model with more positions"
            )


def _settings(given: dict[str, Any], task: str | None, seed: int) -> GenerationSettings:
    """What a task says of the generation; where it draws, every request draws its own."""
    asked = dict(normalize_gen_kwargs(given, _ANSWER_TOKENS))
    stops, tokens = asked.pop("until"), asked.pop("max_gen_toks")
    sampled, temperature = asked.pop("do_sample"), asked.pop("temperature", 0.0)
    unknown = set(asked) - (frozenset() if sampled else _WITHOUT_EFFECT)
    if unknown:
        raise InvalidArgumentError(
            f"tasks: expected until, max_gen_toks, do_sample and temperature in the "
            f"generation_kwargs of {task}, got {', '.join(sorted(unknown))}, which is not "
            "supported; leave the task out"
        )
    return GenerationSettings(
        max_new_tokens=tokens,
        temperature=temperature if sampled else 0.0,
        seed=seed,
        stop_strings=tuple(stop for stop in stops if stop),
    )


def _rows(results: dict[str, Any], method: Method) -> list[Row]:
    """The scores of every task; those of groups are means that anyone can take."""
    rows = []
    for task, scores in results["results"].items():
        if task not in results["n-samples"]:
            continue
        for key, score in scores.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(score, int | float):
                continue
            rows.append(
                {
                    "task": task,
                    "version": results["versions"].get(task),
                    "method": method.label,
                    "policy": method.describe(),
                    "metric": metric,
                    "filter": filtered,
                    "score": score,
                    "samples": results["n-samples"][task]["effective"],
                }
            )
    return rows
