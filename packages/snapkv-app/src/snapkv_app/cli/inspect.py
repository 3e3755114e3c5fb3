"""`snapkv inspect`: a page that shows what was kept of a document, and who voted for it."""

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from snapkv.cache.saving.writing import replace_file
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.validation import DEFAULT_BUDGET
from snapkv_app import text_files
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import integers, token_budget
from snapkv_app.cli.announcing import announce_model
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.methods import known_method, parsed, specs, takes_budget
from snapkv_app.cli.options import MethodOptions
from snapkv_app.cli.outputs import Output, WritingOptions
from snapkv_app.cli.standard_output import write
from snapkv_app.prompts import question_prompt, require_question

EXAMPLES = {
    "inspect": ('snapkv inspect contract.pdf -q "Who may end it?" --output report.html',),
}

MOST_BUDGETS = 12
"""Limit of budgets for the slider."""

PARTS = (32, 16, 8, 4)
"""Parts of the prompt that the budgets of the slider are where none are given."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions(MethodOptions, WritingOptions):
    """All options except the documents and the question."""

    beside: Annotated[
        list[str] | None,
        panels.policy(
            help="Another method to compare, with parameters or a budget: streaming-llm, "
            "snapkv:kernel_size=1, h2o@256; @128 is --policy with that budget; again for "
            "more"
        ),
    ] = None
    budgets: Annotated[
        str,
        panels.policy(
            help="Budgets of the slider, each of which is another answer, separated by commas: "
            "64,256,1k",
            show_default="1/32, 1/16, 1/8 and 1/4 of the prompt",
        ),
    ] = ""
    output: Annotated[str, panels.output("--output", "-o", help="The page to write"), Output()] = (
        "inspection.html"
    )

    def __post_init__(self) -> None:
        """Also check the methods of --beside."""
        super().__post_init__()
        for spec in specs(self.beside or []):
            name, at, budget = spec.partition("@")
            if name:
                known_method(name.partition(":")[0], "beside")
            try:
                _ = token_budget(budget) if at else None
            except InvalidArgumentError as error:
                raise InvalidArgumentError(
                    f"beside: expected a method, or one with a budget as h2o@256, got {spec!r}; "
                    f"{error}"
                ) from None


@with_options(InspectOptions)
def inspect(files: panels.Documents, question: panels.Question, options: InspectOptions) -> None:
    """Show on one page what was kept of documents, who voted for it, and the answers."""
    require_question(question)
    settings, sizes = options.settings(), _sizes(options)
    read, warnings = text_files.read_noting(files)

    announce_model(options.model)
    from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

    policy = build_policy(options)
    budgets = [(f"{size:,}", _with_budget(options, size)) for size in sizes or ()]

    from snapkv.policies.default import method_name
    from snapkv_app.answering import prompt_ids
    from snapkv_app.cli.changes import asked, explained_length
    from snapkv_app.cli.loading import answers_progress, load_model, say_if_demo
    from snapkv_app.cli.session import versions
    from snapkv_app.inspector import inspect_prompt

    policies = [(method_name(policy.describe()), policy), *_beside(options, policy)]
    loaded = load_model(options)
    prompt = question_prompt(
        loaded.tokenizer, text_files.join(read), question, answer_start=options.answer_start
    )
    with explained_length(loaded, question, settings, asked(files, question, options.model)):
        prompt_tokens = prompt_ids(loaded, prompt, settings).shape[1]
    if sizes is None:
        budgets = _parts_of(options, prompt_tokens)
    with answers_progress("inspecting") as advance:
        found = inspect_prompt(loaded, prompt, policies, settings, budgets=budgets, on_step=advance)
    request = {
        "documents": [document.name for document in read],
        "warnings": warnings or None,
        "question": question,
        "model": loaded.description(),
        "settings": asdict(settings),
        "budgets": [label for label, _ in budgets],
        **versions(),
    }
    page, target = found.page(request).html, Path(options.output)
    try:
        replace_file(target, page)
    except OutputError:  # the answers took minutes: print them even if the page cannot be written
        write(f"full cache: {found.full.text.strip()}\n")
        for method in found.methods:
            write(f"{method.label}: {method.chosen.answer.text.strip()}\n")
        raise
    typer.echo(f"{target}: {len(page.encode()):,} bytes, open it in a browser")
    say_if_demo(loaded)


def _sizes(options: InspectOptions) -> list[int] | None:
    """The budgets that were asked for, each once, the smallest first; None if none were."""
    if not options.budgets:
        return None
    budgets = sorted(set(integers("budgets", options.budgets)))
    if len(budgets) > MOST_BUDGETS:
        raise InvalidArgumentError(
            f"budgets: expected at most {MOST_BUDGETS}, since each is an answer, got "
            f"{len(budgets)}; leave some out"
        )
    return budgets


def _parts_of(options: InspectOptions, prompt_tokens: int) -> list[tuple[str, Any]]:
    """The method at parts of the prompt, but for those that it refuses, as below its window."""
    found = []
    for part in PARTS:
        with contextlib.suppress(InvalidArgumentError):
            found.append((f"1/{part}", _with_budget(options, prompt_tokens // part)))
    return found


def _with_budget(options: InspectOptions, budget: Any) -> Any:
    """The policy of the options with another budget; refused if `--set` sets one."""
    from snapkv_app.cli.policy import build_policy

    for assignment in options.set_ or []:
        if assignment.partition("=")[0].rpartition(".")[2] in ("budget", "keep_ratio"):
            raise InvalidArgumentError(
                f"set: expected no budget together with other budgets of the same method, got "
                f"{assignment!r}; pass --budget"
            )
    return build_policy(replace(options, budget=budget, keep_ratio=None))


def _beside(options: InspectOptions, policy: Any) -> list[tuple[str, Any]]:
    """The methods of --beside: a label and a policy each."""
    from snapkv.policies.default import method_name
    from snapkv_app.cli.policy import named_policies
    from snapkv_app.inspector.ballots import scorer_of

    own = getattr(scorer_of(policy) or policy, "budget", None)
    usual = own if isinstance(own, int) else DEFAULT_BUDGET
    found = []
    for spec in specs(options.beside or []):
        name, at, text = spec.rpartition("@")
        if at and not name:
            label = f"{method_name(policy.describe())}@{text}"
            found.append((label, _with_budget(options, token_budget(text))))
            continue
        if at and not takes_budget(*parsed(name)):
            raise InvalidArgumentError(
                f"beside: expected a budget only for a method without one, got "
                f"{spec!r}; leave out @{text}"
            )
        budget = token_budget(text) if at else usual
        found += named_policies([], [name or spec], [budget])
    return found
