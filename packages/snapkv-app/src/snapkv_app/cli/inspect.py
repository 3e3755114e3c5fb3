"""`snapkv inspect` writes a page that shows the kept tokens of a document and their voters."""

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from snapkv.cache.saving.writing import replace_file
from snapkv.errors import InvalidArgumentError, OutputError, wrong
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
"""The largest number of budgets for the slider."""

PARTS = (32, 16, 8, 4)
"""The default budgets of the slider, each as a divisor of the length of the prompt."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions(MethodOptions, WritingOptions):
    """The options of `inspect` except the documents and the question."""

    beside: Annotated[
        list[str] | None,
        panels.policy(
            help="Another method to compare, with parameters or a budget: streaming-llm, "
            "snapkv:kernel_size=1, h2o@256; @128 is --policy with that budget; may be repeated"
        ),
    ] = None
    budgets: Annotated[
        str,
        panels.policy(
            help="Budgets of the slider, separated by commas, with an answer for each: 64,256,1k",
            show_default="1/32, 1/16, 1/8 and 1/4 of the prompt",
        ),
    ] = ""
    output: Annotated[str, panels.output("--output", "-o", help="The page to write"), Output()] = (
        "inspection.html"
    )

    def __post_init__(self) -> None:
        """Check the options, among them the methods and budgets of ``--beside``.

        The parameters of these methods are not checked.

        Raises:
            InvalidArgumentError: a method is unknown, or its budget is not a budget.
        """
        super().__post_init__()
        for spec in specs(self.beside or []):
            name, at, budget = spec.partition("@")
            if name:
                known_method(name.partition(":")[0], "beside")
            try:
                _ = token_budget(budget) if at else None
            except InvalidArgumentError as error:
                problem = f"the budget of {spec!r} is not valid ({str(error).rstrip('.')})"
                raise wrong("beside", problem, "For example, use --beside h2o@256") from None


@with_options(InspectOptions)
def inspect(files: panels.Documents, question: panels.Question, options: InspectOptions) -> None:
    """Write a page that shows the answers, the kept tokens and who voted for them.

    Raises:
        InvalidArgumentError: the question is empty, or an option or a budget is impossible.
        DocumentError: a file cannot be read.
        OutputError: the page cannot be written. The answers have then been printed.
        SnapKVError: the model cannot be loaded, or an answer cannot be computed.
    """
    require_question(question)
    settings, sizes = options.settings(), _read_budgets(options)
    read, warnings = text_files.read_with_notices(files)

    announce_model(options.model)
    from snapkv_app.cli.policy import build_policy  # imports torch, after the checks above

    policy = build_policy(options)
    budgets = [(f"{size:,}", _with_budget(options, size)) for size in sizes or ()]

    from snapkv.policies.default import method_name
    from snapkv_app.answering import prompt_ids
    from snapkv_app.cli.changes import ask_command, explained_length
    from snapkv_app.cli.loading import answers_progress, load_model, say_if_demo
    from snapkv_app.cli.session import versions
    from snapkv_app.inspector import inspect_prompt

    policies = [(method_name(policy.describe()), policy), *_compared_policies(options, policy)]
    loaded = load_model(options)
    prompt = question_prompt(
        loaded.tokenizer, text_files.join(read), question, answer_start=options.answer_start
    )
    with explained_length(loaded, question, settings, ask_command(files, question, options.model)):
        prompt_tokens = prompt_ids(loaded, prompt, settings).shape[1]
    if sizes is None:
        budgets = _default_budgets(options, prompt_tokens)
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
    except OutputError:  # the answers took minutes, so they are printed even without the page
        write(f"full cache: {found.full.text.strip()}\n")
        for method in found.methods:
            write(f"{method.label}: {method.chosen.answer.text.strip()}\n")
        raise
    typer.echo(f"{target}: {len(page.encode()):,} bytes, open it in a browser")
    say_if_demo(loaded)


def _read_budgets(options: InspectOptions) -> list[int] | None:
    """Parse the budgets of the slider, sorted and without duplicates; None if none is given.

    Raises:
        InvalidArgumentError: there are more than `MOST_BUDGETS`, or one is not a whole number.
    """
    if not options.budgets:
        return None
    budgets = sorted(set(integers("budgets", options.budgets)))
    if len(budgets) > MOST_BUDGETS:
        problem = f"expected at most {MOST_BUDGETS} budgets, but got {len(budgets)} budgets"
        raise wrong(
            "budgets",
            problem,
            "Use fewer budgets, because a separate answer is generated for each of them",
        )
    return budgets


def _default_budgets(options: InspectOptions, prompt_tokens: int) -> list[tuple[str, Any]]:
    """Return a label and a policy for each of `PARTS` of the prompt.

    Parts that are too small for the window are left out, and so are all if ``--set`` sets a budget.
    """
    found = []
    for part in PARTS:
        with contextlib.suppress(InvalidArgumentError):  # the budget is smaller than the window
            found.append((f"1/{part}", _with_budget(options, prompt_tokens // part)))
    return found


def _with_budget(options: InspectOptions, budget: Any) -> Any:
    """Build the policy of the options with another budget.

    Raises:
        InvalidArgumentError: ``--set`` sets the budget as well, or the budget is too small for the
            window.
    """
    from snapkv_app.cli.policy import build_policy

    for assignment in options.set_ or []:
        if assignment.partition("=")[0].rpartition(".")[2] in ("budget", "keep_ratio"):
            problem = f"{assignment!r} sets a budget, but this command compares several budgets"
            raise wrong("set", problem, "Use the option --budget instead")
    return build_policy(replace(options, budget=budget, keep_ratio=None))


def _compared_policies(options: InspectOptions, policy: Any) -> list[tuple[str, Any]]:
    """Build a label and a policy for each method of ``--beside``.

    A method without a budget gets that of `policy`, or `DEFAULT_BUDGET` if it is not a number.
    ``@BUDGET`` alone is the method of the options with that budget.

    Raises:
        InvalidArgumentError: a method that takes no budget, or has one already, is given another;
            or a method refuses a parameter or its budget.
    """
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
            problem = f"the method already has a budget, but got another budget in {spec!r}"
            raise wrong("beside", problem, f"Remove @{text}")
        budget = token_budget(text) if at else usual
        found += named_policies([], [name or spec], [budget])
    return found
