"""The seeded faults: which text of the source becomes which, and which suites notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        file: below the `src` of its package.
        name: what is wrong.
        old: text that stands once in the file.
        new: what is put in its place.
        suites: below the tests of its package; at least one of them must notice.
    """

    file: str
    name: str
    old: str
    new: str
    suites: tuple[str, ...]

    def path_of(self, suite: str) -> Path:
        """Where the suite is, from the root of the repository."""
        package = Path(self.file).parts[0].replace("_", "-")
        return Path("packages", package, *_BELOW.get(package, ("tests",)), suite)


_BELOW = {"snapkv-vllm": ("tests", "serving")}

# Of each file: what is wrong, the text before, the text after, and the suites.
_SEEDED: dict[str, list[tuple[str, ...]]] = {
    "snapkv/cache/hybrid.py": [
        (
            "a state stays in its row where rows change places",
            "        LinearAttentionLayer.reorder_cache(self, beam_idx)\n",
            "",
            "matrix/test_matrix.py",
        )
    ],
    "snapkv/cache/layer_group.py": [
        (
            "layers that are unlike choose together",
            "elif self._next != (prompt.depth, prompt.stack_key):",
            "elif self._next[0] != prompt.depth:",
            "cache/test_layer_group.py",
        ),
        (
            "of layers that wait all queries are held",
            "prompt = replace(prompt, queries=prompt.queries.clone())",
            "pass",
            "cache/test_layer_group.py",
        ),
    ],
    "snapkv/cache/layer.py": [
        (
            "a branch votes by the queries of the steps that go on without it",
            "        self.queries.own()\n        self.store.finalize_step()\n",
            "        self.store.finalize_step()\n",
            "hf/test_step_graph.py",
        ),
        (
            "a branch keeps room that nobody takes back",
            "        copied.release_append_buffer()\n",
            "",
            "hf/test_step_graph.py",
        ),
        (
            "notes stay in their row where rows change places",
            "self.slots, self.state = self.slots.select_rows(beam_idx), "
            "self.state.select_rows(beam_idx)",
            "self.slots = self.slots.select_rows(beam_idx)",
            "cache/test_layer_state.py",
        ),
    ],
    "snapkv/cache/queries.py": [
        (
            "replayed queries do not vote with the next turn",
            "held.copy_(torch.cat([held",
            "(torch.cat([held",
            "hf/test_step_graph.py",
        )
    ],
    "snapkv/cache/read_ids.py": [
        (
            "ids of a part that was taken back in the middle stay",
            "ids[:, : columns - start]",
            "ids",
            "hf/test_read_ids.py",
        ),
        (
            "beams are compared with the ids of another row",
            "states.repeat_interleave(rows // len(states), dim=0)",
            "states.repeat(rows // len(states), 1)",
            "hf/test_read_ids.py",
        ),
        (
            "only the first token that was read is compared",
            "end = min(first + known.shape[1], start + ids.shape[1], seen)",
            "end = min(first + known.shape[1], start + ids.shape[1], seen) - 1",
            "hf/test_read_ids.py",
        ),
    ],
    "snapkv/cache/prompt_state.py": [
        (
            "an announced prompt is still to come when it has ended",
            "return self.prompt_end is not None and self.seen_tokens < self.prompt_end\n",
            "return self.prompt_end is not None and self.seen_tokens <= self.prompt_end\n",
            "hf/test_cache.py",
        ),
        (
            "an end that was taken back stays announced",
            "end is not None and end <= seen_before and",
            "end is not None and end < seen_before and",
            "sequences/test_sequences.py",
        ),
        (
            "a prompt that failed stays announced",
            "                self.prompt_end = before\n                schedule_recall",
            "                schedule_recall",
            "hf/test_generate.py",
        ),
    ],
    "snapkv/cache/rows.py": [
        (
            "a crop keeps as many of the last queries as there are slots",
            'left = tensor.shape[axes["token_axis"]] - tokens',
            "left = slots",
            "cache/test_layer_state.py",
        ),
        (
            "what is only measured counts as held",
            'self._declared().values() if axes["is_counted"]',
            "self._declared().values()",
            "cache/test_layer_state.py",
        ),
    ],
    "snapkv/cache/saving/encoding.py": [
        (
            "a saved cache forgets that it must recall",
            'layer.offloaded.is_due = saved["recall_due"]',
            "layer.offloaded.is_due = False",
            "sequences/test_sequences.py",
        ),
        (
            "what lies off the device goes into a file as it came, where few bits were asked for",
            'parts["offloaded"] = state_in_codes(both, codes)',
            'parts["offloaded"] = tuple(both.values())',
            "storage/test_coded.py",
        ),
        (
            "parts of a file that do not fit together fill a layer",
            "    if not fits:\n",
            "    if False:\n",
            "cache/test_saving.py",
        ),
        (
            "a saved cache forgets the states beside its keys",
            '{"beside": _encode(_saveable(others), name, tensors)} if others else {}',
            "{}",
            "sequences/test_sequences.py",
        ),
    ],
    "snapkv/cache/saving/files.py": [
        (
            "a saved file may have changed",
            "if _digest(file, start) != sealed:",
            "if len(_digest(file, start)) != len(sealed):",
            "cache/test_saving.py",
        ),
        (
            "a file that is no saved cache is replaced",
            "bool(header and _FORMATS.search(header))",
            "bool(header)",
            "cache/test_saving.py",
        ),
    ],
    "snapkv/cache/saving/writing.py": [
        (
            "what another writer is writing is swept away",
            "found.stat().st_mtime < oldest",
            "found.stat().st_mtime > oldest",
            "cache/test_writing.py",
        ),
        (
            "half a line stays where writing it failed",
            "                os.ftruncate(descriptor, size)",
            "                pass",
            "cache/test_writing.py",
        ),
        (
            "a saved file is for its owner alone",
            "            partial.chmod(mode)  # safetensors",
            "            # safetensors",
            "cache/test_writing.py",
        ),
        (
            "a link is replaced by a file",
            "Path(os.path.realpath(path))",
            "Path(os.path.abspath(path))",
            "cache/test_writing.py",
        ),
    ],
    "snapkv/cache/slots.py": [
        (
            "what stands behind a dropped span has a position too low",
            "reached = torch.searchsorted(begins.contiguous(), "
            "places.flatten(1).contiguous(), right=True)",
            "reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous())",
            "cache/test_spans.py",
            "sequences/test_sequences.py",
        ),
        (
            "a span that was dropped counts twice for the positions behind it",
            "after = self.removed_spans[..., 0] - (sums - lengths)",
            "after = self.removed_spans[..., 0] - sums",
            "cache/test_spans.py",
            "sequences/test_sequences.py",
        ),
        (
            "the last pad of a row is seen",
            "return torch.arange(columns, device=device) >= first",
            "return torch.arange(columns, device=device) >= first - 1",
            "cache/test_pads_between_turns.py",
        ),
        (
            "what was noted of slots moves to the slots behind them",
            "functional.pad(self.slot_scores, (0, new_tokens))",
            "functional.pad(self.slot_scores, (new_tokens, 0))",
            "golden/test_golden.py",
        ),
        (
            "tokens that a row was told to drop were never seen",
            "(each.tokens - self.removed_tokens for each in",
            "(-self.removed_tokens for each in",
            "cache/test_spans.py",
            "sequences/test_sequences.py",
        ),
        (
            "a crop forgets too little of what was dropped",
            "Spans(((max(0, seen - tokens), seen),))",
            "Spans(((max(0, seen - count), seen),))",
            "cache/test_spans.py",
        ),
        (
            "kept tokens behind a dropped span lose the pads of their row",
            "places = (ranks + pads[:, None, None])",
            "places = ranks",
            "cache/test_spans.py",
        ),
        (
            "a row with fewer dropped spans than another ends in empty ones",
            "((0, 0),) * (most - len(each.parts)) + each.parts",
            "each.parts + ((0, 0),) * (most - len(each.parts))",
            "cache/test_spans.py",
        ),
    ],
    "snapkv/cache/spans.py": [
        (
            "a layer that drops all that it had evicted counts as compressed",
            "            _make_whole(layer)\n",
            "            pass\n",
            "cache/test_spans.py",
        ),
        (
            "queries of dropped tokens vote on the next turn",
            "layer.queries.drop(left, positions[:, 0])",
            "pass",
            "cache/test_spans.py",
        ),
        (
            "spans are protected as if rows had no pads",
            "replace(layer.slots, pads=pads).positions_of",
            "layer.slots.positions_of",
            "cache/test_protect.py",
        ),
        (
            "a span may reach one token beyond what was seen",
            "own.parts[-1][1] > seen:",
            "own.parts[-1][1] > seen + 1:",
            "cache/test_spans.py",
        ),
        (
            "all of a row may be dropped",
            "if gone.tokens >= seen:",
            "if gone.tokens > seen:",
            "cache/test_spans.py",
        ),
    ],
    "snapkv_app/cli/sources.py": [
        (
            "a document is joined that leaves no position for the answer",
            "if loaded.has_positions(taken + hit.tokens + options.max_new_tokens):",
            "if loaded.has_positions(taken + hit.tokens):",
            "cli/test_library.py",
        ),
    ],
    "snapkv_app/decoding.py": [
        (
            "a text in seven bits is read as UTF-8",
            'if shift.search(data)), "utf-8")',
            'if shift.match(data)), "utf-8")',
            "app/test_documents.py",
        ),
        (
            "a text in UTF-16 without a mark is read in the other order of bytes",
            'return "utf-16-be" if first else "utf-16-le"',
            'return "utf-16-le" if first else "utf-16-be"',
            "app/test_text_files.py",
        ),
    ],
    "snapkv_app/cli/interrupts.py": [
        (
            "a command that is interrupted is never said to continue",
            'return any(f"{typed} ".startswith',
            'return not any(f"{typed} ".startswith',
            "cli/test_outputs.py",
        ),
    ],
    "snapkv_app/cli/chat.py": [
        (
            "a conversation that goes on is told of the documents of the command line",
            "self.conversation, self.warnings = self.load(path), []",
            "self.conversation = self.load(path)",
            "cli/test_failures.py",
        ),
        (
            "a conversation in a pipe ends with status 0 after a failed question",
            "if self.has_failed and not sys.stdin.isatty():",
            "if self.has_failed and sys.stdin.isatty():",
            "cli/test_chat.py",
        ),
    ],
    "snapkv_app/cli/outputs.py": [
        (
            "two options write the same file",
            "if taken.setdefault(real, name) != name:",
            "if taken.setdefault(real, name) != taken[real]:",
            "cli/test_refusals.py",
        ),
        (
            "a file that is an input is replaced with --force",
            "if any(os.path.samestat(status, os.stat(file)) for file in files):",
            "if False:",
            "cli/test_outputs.py",
        ),
        (
            "a file that is there is replaced without --force",
            "if output.is_added_to or not force:",
            "if output.is_added_to:",
            "cli/test_outputs.py",
        ),
    ],
    "snapkv_app/cli/app.py": [
        (
            "an error follows an object that was printed as a second one",
            'if "--json" in arguments and not output.has_written:',
            'if "--json" in arguments:',
            "cli/test_failures.py",
        ),
        (
            "of an option that is given twice the last one counts",
            "if takes_one and (times := given.count(option)) > 1:",
            "if takes_one and (times := given.count(option)) > 9:",
            "cli/test_without_torch.py",
        ),
        (
            "a full disk is bad input",
            "return _fail(str(error), _FAILURE if is_failure else _BAD_INPUT)",
            "return _fail(str(error), _BAD_INPUT)",
            "cli/test_failures.py",
        ),
    ],
    "snapkv_app/cli/changes.py": [
        (
            "a larger budget is the one that was kept",
            "tokens = 2 * max(1, round(answer.kept_tokens))",
            "tokens = max(1, round(answer.kept_tokens))",
            "cli/test_notes.py",
        ),
        (
            "a changed command repeats the option that it changes",
            'if flag not in flags | {"--set"}:',
            'if flag not in {"--set"}:',
            "cli/test_notes.py",
        ),
    ],
    "snapkv_app/cli/notes.py": [
        (
            "a check that found a difference ends with status 0",
            "status=0 if found.same else DIFFERS",
            "status=0",
            "cli/test_notes.py",
        ),
        (
            "many lost votes that are spread count as few",
            "< LITTLE_VOTE and share",
            "< LITTLE_VOTE or share",
            "cli/test_notes.py",
        ),
        (
            "sampled answers that differ get a command to try next",
            "not (found.same or options.temperature)",
            "not found.same",
            "cli/test_notes.py",
        ),
    ],
    "snapkv_app/cli/amounts.py": [
        (
            "a kilobyte has 1,024 bytes",
            'base = 1024 if (found[3] or "").lower() == "ib" else 1000',
            "base = 1024",
            "cli/test_amounts.py",
        ),
        (
            "a negative number counts as positive",
            "return int(whole) * (-1 if sign else 1)",
            "return int(whole)",
            "cli/test_amounts.py",
        ),
    ],
    "snapkv_app/plan/planner.py": [
        (
            "what fits is said without the reserve of the device",
            "room, tokens = asked.memory_bytes - asked.reserve_bytes,",
            "room, tokens = asked.memory_bytes,",
            "plan/test_planner.py",
        ),
    ],
    "snapkv_app/conversation.py": [
        (
            "the end token of an answer stands twice before the next turn",
            "if is_written and last in end_token_ids",
            "if is_written and last not in end_token_ids",
            "app/test_conversation.py",
        ),
        (
            "a turn that failed stays in the conversation's cache",
            "self.cache = before  #",
            "pass  #",
            "app/test_conversation.py",
        ),
    ],
    "snapkv_app/models.py": [
        (
            "an encoder-decoder is loaded",
            "if config.is_encoder_decoder:",
            "if False:",
            "app/test_models.py",
        ),
    ],
    "snapkv_app/text_files.py": [
        (
            "what is missing of a document is not told",
            "        if losses:\n",
            "        if False:\n",
            "app/test_text_files.py",
        ),
        (
            "the hidden files of a folder are read",
            'for name in files if name[0] != "."]',
            "for name in files]",
            "app/test_text_files.py",
        ),
    ],
    "snapkv_app/protection.py": [
        (
            "a text to protect is read as a regular expression",
            "re.finditer(re.escape(text), prompt.text)",
            "re.finditer(text, prompt.text)",
            "app/test_protection.py",
        ),
        (
            "the token after a protected text is protected too",
            "if begin < stop and end > start and end > begin",
            "if begin <= stop and end > start and end > begin",
            "app/test_protection.py",
        ),
    ],
    "snapkv_app/prompts.py": [
        (
            "a question that the document quotes is hidden from its first place on",
            "removesuffix(self.answer_start).rfind(question)",
            "removesuffix(self.answer_start).find(question)",
            "app/test_answering.py",
        ),
    ],
    "snapkv_app/answering.py": [
        (
            "an answer that the model ended with its last token is said to be cut off",
            '"length" if cut_off and not ended else "stop"',
            '"length" if cut_off else "stop"',
            "app/test_answering.py",
        ),
        (
            "tokens of the answer count as kept tokens of the prompt",
            "((at >= 0) & (at < tokens)).sum(-1)",
            "(at >= 0).sum(-1)",
            "app/test_answering.py",
        ),
        (
            "a prompt that leaves no position for the answer is read",
            "loaded.has_positions(prompt_tokens + new_tokens)",
            "loaded.has_positions(prompt_tokens)",
            "app/test_answering.py",
        ),
        (
            "the beginning of a stop string is printed",
            "end = len(self._text) - (0 if stream_end else longest - 1)",
            "end = len(self._text)",
            "app/test_answering.py",
        ),
        (
            "answers whose texts begin alike are said to differ at their first token",
            "for number, (a, b) in enumerate(pairs) if a != b",
            "for number, (a, b) in enumerate(pairs) if a == b",
            "app/test_answering.py",
        ),
    ],
    "snapkv_app/library/records.py": [
        (
            "a passage's last line is the one after it",
            'return first, first + text.count("\\n", start, stop)',
            'return first, first + text.count("\\n", start, stop + 1)',
            "library/test_searching.py",
        ),
        (
            "passages do not overlap",
            "range(0, len(words), PASSAGE_WORDS - OVERLAP_WORDS)",
            "range(0, len(words), PASSAGE_WORDS)",
            "library/test_searching.py",
        ),
    ],
    "snapkv_app/library/searching.py": [
        (
            "a word in half of the passages weighs nothing",
            "weight = math.log1p(odds) / max(math.log(odds), 1e-6)",
            "weight = 1.0",
            "library/test_searching.py",
        ),
        (
            "a word of a question is looked for in its case",
            "folded(question).lower())",
            "folded(question))",
            "library/test_searching.py",
        ),
    ],
    "snapkv_app/library/bound.py": [
        (
            "the document that was asked for last is evicted",
            "if key not in self._stay and key != last]",
            "if key not in self._stay]",
            "library/test_bound.py",
        ),
        (
            "documents that were asked for lately are evicted first",
            "return sorted(free, key=lambda key: (asked.get(key) or "
            "self._folder.written_at(key), key))",
            "return sorted(free, key=lambda key: (self._folder.written_at(key), key))",
            "library/test_bound.py",
        ),
    ],
    "snapkv_app/library/folder.py": [
        (
            "what an adder that was killed has left stays for good",
            "            if is_left:\n",
            "            if False:\n",
            "library/test_library.py",
        ),
        (
            "the cache of a removed document stays on the disk",
            "                place.unlink(missing_ok=True)\n"
            "            _unlink(self.cache_file(record))\n",
            "                place.unlink(missing_ok=True)\n",
            "library/test_library.py",
        ),
        (
            "a library is made among the files of somebody else",
            "        if strangers:\n",
            "        if False:\n",
            "library/test_library.py",
        ),
    ],
    "snapkv_app/library/library.py": [
        (
            "a document that has changed is not read again",
            "if known is not None and known.sha256 != digest_of(text.text):",
            'if known is None and text.text == "":',
            "library/test_library.py",
        ),
        (
            "a document whose file is damaged is skipped",
            "if self._folder.fault_of(known, checked=False) is None:",
            "if known is not None:",
            "library/test_library.py",
        ),
        (
            "a limit below what is stored evicts documents unasked",
            "if going and not evict:",
            "if evict and not going:",
            "library/test_bound.py",
        ),
    ],
    "snapkv_app/control_words.py": [
        (
            "a mark that a text has passes for one of ours",
            "content = content.replace(_MARK, 2 * _MARK)",
            "content = content",
            "test_control_words.py",
        ),
        (
            "a token for what is unknown is a control token",
            "set(control_words(tokenizer).values()) - {tokenizer.unk_token_id}",
            "set(control_words(tokenizer).values())",
            "test_control_words.py",
        ),
    ],
    "snapkv_lab/evaluate/summary.py": [
        (
            "a prompt that lost nothing counts as compressed",
            'each["kept_tokens"] < each["prompt_tokens"]',
            'each["kept_tokens"] <= each["prompt_tokens"]',
            "lab/evaluate/test_summary.py",
        ),
    ],
    "snapkv_lab/measure/timing.py": [
        (
            "warm-up rounds count",
            "of_name[warmup_rounds:]",
            "of_name[:]",
            "lab/measure/test_timing.py",
        ),
    ],
    "snapkv_lab/study/measures.py": [
        (
            "the attention that makes a position important is summed over heads that did "
            "not select it",
            "(times * masks).sum(dim=1)",
            "(times * masks.any(dim=1, keepdim=True)).sum(dim=1)",
            "lab/study/test_measures.py",
        ),
    ],
    "snapkv_lab/evaluate/runner.py": [
        (
            "a limit counts the samples of all cells together",
            "        taken[cell] += 1\n        if limit is None or taken[cell] <= limit:",
            "        taken[cell] += 1\n        if limit is None or taken.total() <= limit:",
            "lab/evaluate/test_runner.py",
        ),
        (
            "answers of another policy under the same label are taken over",
            'if record["policy"] != json.loads(json.dumps(asked)):',
            "if asked is None:",
            "lab/evaluate/test_runner.py",
        ),
    ],
    "snapkv_lab/evaluate/tasks/needle.py": [
        (
            "a needle at the end of the text lies after its last whole sentence",
            "        if depth < 100:\n",
            "        if True:\n",
            "lab/evaluate/test_needle.py",
        ),
        (
            "words of an answer count towards a sandwich that they do not name",
            "return len(right & predicted) / len(right)",
            "return len(right & predicted) / len(predicted)",
            "lab/evaluate/test_needle.py",
        ),
    ],
    "snapkv_lab/evaluate/store.py": [
        (
            "a run continues in the folder of another run",
            "            if differing:\n",
            "            if False:\n",
            "lab/evaluate/test_runner.py",
        ),
    ],
    "snapkv_lab/evaluate/intervals.py": [
        (
            "a difference is taken from answers to other samples",
            "return [values[name] for name in names], conversations and",
            "return list(values.values())[: len(names)], conversations and",
            "lab/evaluate/test_summary.py",
        ),
        (
            "an interval holds 90 % of the resampled means",
            "tail = round(RESAMPLES * (1 - LEVEL) / 2)",
            "tail = round(RESAMPLES * (1 - LEVEL))",
            "lab/evaluate/test_summary.py",
        ),
        (
            "turns of a conversation are drawn as if they were independent",
            "draws_of[conversations] = places",
            "pass",
            "lab/evaluate/test_summary.py",
        ),
    ],
    "snapkv_lab/evaluate/metrics.py": [
        (
            "an answer is scored by the first reference alone",
            "return max((metric(prediction, reference) for reference in references), default=0.0)",
            "return next((metric(prediction, reference) for reference in references), 0.0)",
            "lab/evaluate/test_metrics.py",
        ),
        (
            "words of an answer count as often as they are repeated",
            "precision, recall = same / len(predicted), same / len(right)",
            "precision, recall = same / len(right), same / len(right)",
            "lab/evaluate/test_metrics.py",
        ),
        (
            "a backtick begins code",
            're.search("`|#|//", line)',
            're.search("#|//", line)',
            "lab/evaluate/test_metrics.py",
        ),
    ],
    "snapkv_lab/medusa/tree.py": [
        (
            "drafts are judged by the token behind them",
            "tokens[paths[:, 1:]] == chosen[paths[:, :-1]]",
            "tokens[paths[:, 1:]] == chosen[paths[:, 1:]]",
            "lab/medusa/test_acceptance.py",
        ),
        (
            "a candidate sees candidates that are no ancestors",
            "seen[node] |= seen[parent]",
            "seen[node] |= seen[: parent + 1].any(dim=0)",
            "lab/medusa",
        ),
    ],
    "snapkv/hf/attend.py": [
        (
            "queries of a group are masked as their neighbours",
            "mask.repeat(1, 1, Hq // Hkv, 1)",
            "mask.repeat_interleave(Hq // Hkv, dim=2)",
            "hf/test_attend.py",
        ),
        (
            "heads of different length see every branch",
            "visible = None if call.branches is None else call.branches.own_visible\n",
            "visible = None\n",
            "hf/test_branches.py",
        ),
    ],
    "snapkv/hf/attention.py": [
        (
            "spans are protected by columns while an answer grows",
            "positions = columns if pads is None else columns - pads[:, None, None]",
            "positions = columns",
            "cache/test_protect.py",
        )
    ],
    "snapkv/hf/forward_context.py": [
        (
            "a prompt's last token counts as decoding",
            "seen_tokens - new_tokens >= prompt_end",
            "seen_tokens - new_tokens >= prompt_end - 1",
            "hf/test_phases.py",
        ),
        (
            "a refused pass leaves its tokens",
            "        layer.crop(-self.forward_pass.new_tokens)\n",
            "",
            "hf/test_cache.py",
        ),
        (
            "branches are still being read when they are over",
            "        current.branches = None\n",
            "        pass\n",
            "hf/test_branches.py",
        ),
        (
            "layers that share keys attend by what the first of them has become",
            "layer=copy.copy(layer))",
            "layer=layer)",
            "sequences/test_sequences.py",
        ),
    ],
    "snapkv/hf/generate.py": [
        (
            "a prompt and its drafts are read in one pass",
            "behind := prompt_state.tokens_behind(tokens)",
            "behind := 0 * prompt_state.tokens_behind(tokens)",
            "hf/test_generate.py",
        ),
        (
            "a method that decodes by itself loses its streamer",
            'given |= {"streamer": modes[-1]} if streams else {}',
            "given |= {}",
            "hf/test_install.py",
        ),
        (
            "new ids alone pass for all of a text",
            'kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))',
            'kwargs.get("inputs_embeds"))',
            "hf/test_generate.py",
        ),
        (
            "a turn that is announced in the midst is replayed as a step",
            "            steps.close()\n        else:\n",
            "            pass\n        else:\n",
            "hf/test_step_graph.py",
        ),
        (
            "a copied model announces to the first one's caches",
            "memo.get(id(self.model), self.model)",
            "self.model",
            "hf/test_install.py",
        ),
    ],
    "snapkv/hf/identity.py": [
        (
            "other weights of a model are not told from its own",
            "torch.linspace(0, last, count, dtype=torch.float64)",
            "torch.zeros(0)",
            "cache/test_saving.py",
        )
    ],
    "snapkv/hf/install.py": [
        (
            "a model that goes takes the config of another with it",
            "if not any(config is known for other in _known for known in other._configs):",
            "if config is not None:",
            "hf/test_install.py",
        ),
        (
            "a model without caches loses what was installed",
            "return bool(self.caches or self.installs)",
            "return bool(self.caches)",
            "hf/test_install.py",
        ),
        (
            "uninstall leaves an install that was not undone",
            "        installation.installs.clear()\n",
            "",
            "hf/test_install.py",
        ),
    ],
    "snapkv/hf/masks.py": [
        (
            "no mask hides what is at most as low as half",
            "masked_fill(~allowed, lowest)",
            "masked_fill(~allowed, lowest / 4)",
            "hf/test_masks.py",
        ),
        (
            "a mask is shifted in its columns alone",
            "mask_function(batch, head, query + rows, slot + columns)",
            "mask_function(batch, head, query, slot + columns)",
            "hf/test_masks.py",
        ),
    ],
    "snapkv/hf/cache.py": [
        (
            "other passes are read into room that was lent for a step",
            "        if prompt_state.layers[0].store.has_room and not current.is_step:\n",
            "        if False:\n",
            "hf/test_step_graph.py",
        )
    ],
    "snapkv/hf/room.py": [
        (
            "room that runs out is not made larger",
            "        return self._free >= 0 and is_lent\n",
            "        return is_lent\n",
            "hf/test_step_graph.py",
        ),
        (
            "a step goes on as recorded where the cache was changed",
            "        return self._free >= 0 and is_lent\n",
            "        return self._free >= 0\n",
            "hf/test_step_graph.py",
        ),
        (
            "drafts are recorded as one token is",
            "        if prompt_state.verifies_drafts:\n",
            "        if False:\n",
            "hf/test_step_graph.py",
        ),
    ],
    "snapkv/hf/step_graph.py": [
        (
            "the step that is tried fills a slot",
            "                held.copy_(states)\n",
            "                pass\n",
            "hf/test_step_graph.py",
        ),
        (
            "all steps hand out the same output",
            "tree_map_only(Tensor, torch.clone,",
            "tree_map_only(Tensor, lambda made: made,",
            "hf/test_step_graph.py",
        ),
        (
            "a step is recorded of a model in training",
            "if model.training:",
            "if not model.training and False:",
            "hf/test_step_graph.py",
        ),
        (
            "a step is recorded of a model with hooks",
            "if not all(map(_is_known, hooks)) or",
            "if",
            "hf/test_step_graph.py",
        ),
    ],
    "snapkv_app/library/joining.py": [
        (
            "a joined document's keys stand one position off",
            "torch.full((1, 1), step,",
            "torch.full((1, 1), step + 1,",
            "library/test_blending.py",
        )
    ],
    "snapkv/ops/codes/coding.py": [
        (
            "codes are a step too fine",
            "steps = [2**bits - 1 for _, bits, _ in parts]",
            "steps = [2**bits for _, bits, _ in parts]",
            "ops/test_codes.py",
        ),
        (
            "the two codes of a byte change places",
            "low, high = numbers.unbind",
            "high, low = numbers.unbind",
            "ops/test_codes.py",
        ),
    ],
    "snapkv/ops/codes/layout.py": [
        (
            "tokens of an unfilled block of codes are attended to",
            "for slot in range(count, G)]",
            "for slot in range(count + 1, G)]",
            "ops/test_codes.py",
        ),
        (
            "tokens that are encoded behind a prompt stand before it",
            "BlockLayout((*self.sections, section)",
            "BlockLayout((section, *self.sections)",
            "ops/test_codes.py",
        ),
    ],
    "snapkv/ops/ragged/inputs.py": [
        (
            "ragged attention lets a token see the next one",
            "hidden = slots >= own",
            "hidden = slots > own",
            "ops/test_ragged.py",
        ),
        (
            "ragged attention sees slots of a buffer that nothing is written to",
            "end = S if self.tail_tokens is None else self.tail_tokens",
            "end = S",
            "ops/test_ragged.py",
        ),
    ],
    "snapkv/ops/ragged/layout.py": [
        (
            "the last edge of ragged heads is read as a whole block",
            "(edges if offset or block == whole else blocks)",
            "(edges if offset and block < whole else blocks)",
            "ops/test_ragged.py",
        )
    ],
    "snapkv/ops/redundancy.py": [
        (
            "the oldest of similar keys is exempt",
            "similar.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1)",
            "similar.cumsum(dim=-1, dtype=torch.int32)",
            "policies/test_rkv.py",
        )
    ],
    "snapkv/ops/votes/blocked.py": [
        (
            "in blocks, a query of the window does not see its own token",
            "ahead.triu_(tokens - W - first + 1)",
            "ahead.triu_(tokens - W - first)",
            "ops",
        ),
        (
            "in blocks, the cap of scores is not scaled back",
            ".tanh_().mul_(softcap)",
            ".tanh_()",
            "ops",
        ),
        (
            "heads are gathered from the KV head of another group",
            ".view(B, Hs, heads // Hs, -1) + begins",
            ".view(B, heads // Hs, Hs, -1).transpose(1, 2) + begins",
            "sequences/test_sequences.py",
            "ops",
        ),
        (
            "in blocks, a sink's share of the softmax is forgotten",
            "carried: Tensor | float = 1.0",
            "carried: Tensor | float = 0.0",
            "ops",
        ),
    ],
    "snapkv/ops/votes/by_head.py": [
        (
            "by head, the cap of scores is not scaled back",
            "slope = softcap * _LOG2_E",
            "slope = _LOG2_E",
            "ops/test_blocked.py",
        ),
        (
            "by head, the mean over a group is its sum",
            "        votes /= G\n",
            "        pass\n",
            "ops/test_blocked.py",
        ),
    ],
    "snapkv/ops/votes/reference.py": [
        (
            "a query of the window does not see its own token",
            "positions <= positions[prompt_tokens - window_tokens :, None]",
            "positions < positions[prompt_tokens - window_tokens :, None]",
            "ops",
        ),
        (
            "query heads vote for the KV head of another group",
            "grouped = votes.view(B, num_kv_heads, Hq // num_kv_heads, P)",
            "grouped = votes.view(B, Hq // num_kv_heads, num_kv_heads, P).transpose(1, 2)",
            "ops",
        ),
        (
            "votes are pooled forward instead of backward",
            "F.pad(votes, (behind, before), value=outside)",
            "F.pad(votes, (before, behind), value=outside)",
            "ops",
        ),
        ("a vote fades twice as fast", "decay * last)", "decay * decay * last)", "ops"),
    ],
    "snapkv/ops/votes/top_k.py": [
        (
            "of equal votes the higher position wins",
            "(tied.cumsum(dim=-1) <= room)",
            "(tied.flip(-1).cumsum(dim=-1).flip(-1) <= room)",
            "policies/test_selection_contract.py",
            "ops",
        ),
        (
            "of equal votes the higher position wins, where rows keep different numbers",
            "torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]",
            "torch.sort(scores.flip(-1), dim=-1, descending=True, "
            "stable=True).indices[..., :most].neg().add(scores.shape[-1] - 1)",
            "policies/test_selection_contract.py",
            "ops",
        ),
        (
            "one pad of a row can win",
            "order < pad_tokens[:, None, None] + first_tokens",
            "order < pad_tokens[:, None, None] + first_tokens - 1",
            "policies/test_selection_contract.py",
            "ops",
        ),
    ],
    "snapkv/policies/across_layers.py": [
        (
            "the window counts against what all layers share",
            "map(operator.add, self.policy.counts(prefix), prefix.window_tokens)",
            "map(operator.pos, self.policy.counts(prefix))",
            "policies/test_across_layers.py",
        ),
        (
            "tokens that fill a block of codes in part are kept, too",
            "found = torch.full_like(ranked, -math.inf)",
            "found = torch.full_like(ranked, math.inf)",
            "policies/test_across_layers.py",
        ),
    ],
    "snapkv/cache/shared_budget.py": [
        (
            "layers share out a token too few",
            "return [sum(map(operator.mul, heads, map(max, row, least))) for row in rows]",
            "return [sum(map(operator.mul, heads, map(max, row, least))) - 1 for row in rows]",
            "policies/test_across_layers.py",
        ),
        (
            "layers are pruned to half of what they share",
            "if group.reaches_last or most_held > 2 * max(budgets):",
            "if most_held > max(budgets) // 2:\n"
            "            budgets = budgets if group.reaches_last else [n // 2 for n in budgets]",
            "policies/test_across_layers.py",
        ),
    ],
    "snapkv/ops/ragged/flash.py": [
        (
            "what heads keep weighs as if the tail were less",
            "share = (kept - tailed).sigmoid_()[..., None]",
            "share = (kept - 0.9 * tailed).sigmoid_()[..., None]",
            "ops/test_ragged.py",
        )
    ],
    "snapkv/policies/budget.py": [
        (
            "the top layer of a pyramid keeps most",
            "bottom - (bottom - top) * depth / steps",
            "top + (bottom - top) * depth / steps",
            "policies/test_uneven.py",
        ),
        (
            "AdaKV shares out a token too few",
            "order[: total - sum(whole)]",
            "order[: total - sum(whole) - 1]",
            "policies/test_uneven.py",
        ),
        (
            "of equal remainders the larger share is rounded up",
            "-round(shares[i] - whole[i], 9), shares[i], i)",
            "-round(shares[i] - whole[i], 9), -shares[i], i)",
            "policies/test_uneven.py",
        ),
        (
            "the most that the votes may choose has no window",
            "self.most - prefix.window_size",
            "self.most",
            "policies/test_auto_budget.py",
        ),
        (
            "votes on a long prompt need as much as on a short one",
            ".clamp(min=1.0)\n",
            ".clamp(max=1.0)\n",
            "policies/test_auto_budget.py",
        ),
    ],
    "snapkv/policies/criticalkv.py": [
        (
            "values are weighed by the next group's projection",
            "b[:, head // group] @",
            "b[:, (head + 1) % heads // group] @",
            "policies/test_values.py",
        )
    ],
    "snapkv/policies/expected_attention.py": [
        (
            "queries of sinks count",
            "(positions >= self.sink_tokens)[:, None, :, None]",
            "(positions >= 0)[:, None, :, None]",
            "policies/test_values.py",
        )
    ],
    "snapkv/policies/fastgen.py": [
        (
            "a marker at the end of the text is not found",
            "starts = token_ids.shape[1] - len(marker) + 1",
            "starts = token_ids.shape[1] - len(marker)",
            "policies/test_fastgen.py",
        )
    ],
    "snapkv/policies/h2o.py": [
        (
            "H2O forgets what tokens received before",
            "step.scores + self.rate(step)",
            "self.rate(step)",
            "policies/test_evicting.py",
        )
    ],
    "snapkv/policies/lagkv.py": [
        (
            "a piece is scaled by the piece before it",
            "        lag = pieces[:, 1:]",
            "        lag = pieces[:, :-1]",
            "policies/test_lagkv.py",
        )
    ],
    "snapkv/policies/rkv.py": [
        (
            "the window is redundant, too",
            "scores[..., : -self.window_size] += self.mix_lambda * importance",
            "scores[..., : -self.window_size] += importance",
            "policies/test_rkv.py",
        )
    ],
    "snapkv/policies/scissorhands.py": [
        (
            "the lowest layer has the largest budget",
            "budget * (1 - gamma), budget * (1 + gamma)",
            "budget * (1 + gamma), budget * (1 - gamma)",
            "policies/test_scissorhands.py",
        )
    ],
    "snapkv/policies/spans.py": [
        (
            "spans that touch stay apart",
            "if merged and start <= merged[-1][1]:",
            "if merged and start < merged[-1][1]:",
            "policies/test_spans.py",
        ),
        (
            "a span is shifted by one token",
            "positions.long().contiguous(), right=True)",
            "positions.long().contiguous(), right=False)",
            "policies/test_spans.py",
        ),
    ],
    "snapkv/token_cost.py": [
        (
            "a share is taken of what a float makes of it",
            "int(Fraction(str(share)) * tokens)",
            "int(share * tokens)",
            "policies/test_uneven.py",
        ),
        (
            "bytes that are left over go to the last layers",
            "more = -blocks * depth // layers - -blocks * (depth + 1) // layers",
            "more = blocks * (depth + 1) // layers - blocks * depth // layers",
            "policies/test_byte_budget.py",
        ),
        (
            "what heads may fill in part of a block is not set aside",
            "return more * self.block_tokens - self.spare_tokens",
            "return more * self.block_tokens",
            "policies/test_byte_budget.py",
        ),
    ],
    "snapkv/policies/tova.py": [
        (
            "TOVA lets one head decide for all",
            "weights[:, :, -1].mean(dim=1, keepdim=True)",
            "weights[:, :1, -1]",
            "policies/test_evicting.py",
        )
    ],
    "snapkv/storage/base.py": [
        (
            "sinks are turned from where they were turned to before",
            "sinks = torch.where(were_moved, original, sinks)",
            "sinks = torch.where(were_moved, sinks, sinks)",
            "policies/test_streaming.py",
        )
    ],
    "snapkv/storage/lent_tail.py": [
        (
            "room that nothing is written to holds numbers",
            "states.new_zeros(",
            "states.new_ones(",
            "storage/test_lent_tail.py",
        ),
        (
            "a token with room is written over the one before",
            "self.count.add_(new_tokens)",
            "self.count.add_(0)",
            "storage/test_lent_tail.py",
        ),
    ],
    "snapkv/storage/offload.py": [
        (
            "a later turn is offloaded together with what is there",
            "whole.keys[:, :, done:tokens], whole.values[:, :, done:tokens]",
            "whole.keys[:, :, :tokens], whole.values[:, :, :tokens]",
            "cache/test_recall.py",
        ),
        (
            "offloaded tokens come back that were taken back",
            "end=min(piece.end, tokens)",
            "end=piece.end",
            "sequences/test_sequences.py",
        ),
        (
            "offloaded rows keep the pads of other rows",
            "rows=piece.rows[rows], shift=piece.shift[rows]",
            "rows=piece.rows[rows]",
            "sequences/test_sequences.py",
        ),
        (
            "the limit off the device is held to one layer alone",
            "self.taken_bytes += wanted",
            "self.taken_bytes = wanted",
            "cache/test_recall.py",
        ),
        (
            "dropping spans needs more room off the device",
            "left.append(keys, values, on=stays.device, is_limited=False)",
            "left.append(keys, values, on=stays.device)",
            "cache/test_spans.py",
        ),
    ],
    "snapkv/storage/ragged.py": [
        (
            "the first token of a ragged head is taken for none",
            "slots >= both[..., 1]",
            "slots > both[..., 1]",
            "sequences/test_sequences.py",
        ),
        (
            "ragged rows keep the lengths of other rows",
            "tuple(self.head_tokens[row] for row in rows.tolist())",
            "tuple(self.head_tokens[row] for row in sorted(rows.tolist()))",
            "sequences/test_sequences.py",
        ),
    ],
    "snapkv/storage/ragged_store.py": [
        (
            "heads hold a token that was taken back",
            "[..., : heads.longest_tokens - own])",
            "[..., : heads.longest_tokens - own + 1])",
            "storage/test_coded.py",
        )
    ],
    "snapkv/storage/tail.py": [
        (
            "the append buffer writes over the last token that it handed out",
            "stored.as_strided(new.shape, strides, S * D)",
            "stored.as_strided(new.shape, strides, (S - 1) * D)",
            "storage/test_tail.py",
        ),
        (
            "a copy of a cache is written over by the other",
            "self.keys, self.values, self._room = keys, values, 0",
            "self.keys, self.values = keys, values",
            "storage/test_tail.py",
        ),
        (
            "a crop leaves the values of the tokens behind",
            "self.hold(self.keys[:, :, :left], self.values[:, :, :left])",
            "self.hold(self.keys[:, :, :left], self.values[:, :, tokens:])",
            "hf/test_cache.py",
        ),
    ],
    "snapkv_vllm/versions.py": [
        (
            "the version after the last one that is supported is taken",
            "(int(found[1]), int(found[2])) < NEXT",
            "(int(found[1]), int(found[2])) <= NEXT",
            "test_versions.py",
        ),
    ],
    "snapkv_vllm/front/streams.py": [
        (
            "a stream that is refused has status 200",
            "400 <= code < 600 else 500",
            "400 <= code < 600 and False else 200",
            "test_streams.py",
        ),
    ],
    "snapkv_vllm/front/question.py": [
        (
            "of a question's tokens the first is missing",
            "if size >= len(tail))",
            "if size > len(tail) - 2)",
            "test_question.py",
        ),
    ],
    "snapkv_vllm/front/bodies.py": [
        (
            "a setting that is given twice takes the one outside",
            "for name in found.keys() & inside.keys():",
            "for name in ():",
            "test_bodies.py",
        ),
        (
            "a body that names two sessions takes the second one",
            "if inside is not None and inside != beside:",
            "if False:",
            "test_bodies.py",
        ),
    ],
    "snapkv_vllm/blocks.py": [
        (
            "vLLM's blocks: a request counts rounded room as dropped",
            "self.dropped_tokens[request_id] = order.seen_tokens - reserved",
            "self.dropped_tokens[request_id] = order.dropped_tokens - 1",
            "vllm/test_accounting.py",
            "vllm/test_engine.py",
        ),
        (
            "vLLM's blocks: kept tokens are written into blocks that others share",
            "return bool(self.enable_caching) and",
            "return not self.enable_caching and",
            "vllm/test_accounting.py",
            "vllm/test_engine.py",
        ),
    ],
    "snapkv_vllm/heads.py": [
        (
            "a head's last full page lies behind the others'",
            "torch.where(pages < first,",
            "torch.where(pages < first - 1,",
            "heads/test_places.py",
        ),
        (
            "a page that is not full has no place",
            "pages = -(-self.kept // self.page_tokens)",
            "pages = self.kept // self.page_tokens",
            "heads/test_places.py",
        ),
        (
            "rows between others are taken for the first of a batch",
            "max(batch.counts) == 1 and tuple(batch.starts) == tuple(range(len(batch.starts)))",
            "max(batch.counts) == 1",
            "heads/test_step.py",
        ),
    ],
    "snapkv_vllm/kept_lengths.py": [
        (
            "vLLM is told the slots of tokens that were dropped",
            "right=True",
            "right=False",
            "test_kept_lengths.py",
        )
    ],
    "snapkv_vllm/admission/limits.py": [
        (
            "a budget may be as long as the time between two evictions",
            "if 0 < self.decode_budget <= every:",
            "if 0 < self.decode_budget < every:",
            "test_limits.py",
        )
    ],
    "snapkv_vllm/admission/plans.py": [
        (
            "a window puts queries aside that earlier steps have put aside",
            "first = max(seen_tokens, trigger - compression.selector.query_tokens)",
            "first = trigger - compression.selector.query_tokens",
            "test_plans.py",
        ),
        (
            "an answer may hold a token too many before it is cut",
            "seen - held + limit.max_tokens - 1) + 1",
            "seen - held + limit.max_tokens) + 1",
            "test_plans.py",
        ),
        (
            "an eviction drops a token too few",
            "kept = limit.max_tokens - limit.evict_every",
            "kept = limit.max_tokens - limit.evict_every + 1",
            "test_plans.py",
        ),
        (
            "an answer that has just begun is asked for queries of its prompt",
            "min(count_eviction_queries(limit.policy), due - self.prompt_tokens)",
            "count_eviction_queries(limit.policy)",
            "test_plans.py",
        ),
        (
            "a cached prefix is reused up to the prompt's last token, so that voters are missing",
            "max(0, first.trigger_tokens - max(1, first.selector.query_tokens))",
            "max(0, first.trigger_tokens - 1)",
            "vllm/test_scheduling.py",
        ),
    ],
    "snapkv_vllm/runners.py": [
        (
            "vLLM's rows: a resumed request goes on with what it held before",
            "        *(scheduler_output.preempted_req_ids or ()),\n"
            "        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,\n",
            "",
            "vllm/test_scheduling.py",
            "vllm/test_engine.py",
        )
    ],
    "snapkv_vllm/histories.py": [
        (
            "a request goes on in a block that another request writes",
            "return 0 if self.requests else same",
            "return same",
            "test_digested_tokens.py",
        ),
        (
            "a prompt that leaves a history before its last compression takes its blocks",
            "if same < max(1, prefix.tokens):",
            "if same < 1:",
            "test_digested_tokens.py",
        ),
        (
            "a span that keeps what was dropped is said to be there",
            "if spans.overlap(compressed).without(self.protected).parts:",
            "if False:",
            "test_digested_tokens.py",
        ),
        (
            "tokens of the same digest are one block more",
            "return blocks * BLOCK + (int(differ[0])",
            "return blocks * BLOCK + BLOCK + (int(differ[0])",
            "test_digested_tokens.py",
        ),
        (
            "who has least gives back first",
            "max(beyond, key=lambda one: taken[one.tenant])",
            "min(beyond, key=lambda one: taken[one.tenant])",
            "test_shares.py",
        ),
        (
            "what is within a tenant's share goes",
            "taken[one.tenant] > share]",
            "taken[one.tenant] >= share]",
            "test_shares.py",
        ),
    ],
    "snapkv_vllm/admission/spans.py": [
        (
            "the last token of a prompt may be dropped",
            "DROP: (prompt_tokens - 1,",
            "DROP: (prompt_tokens,",
            "test_spans.py",
        ),
        (
            "a dropped span counts without what was compressed",
            "return self.drop.tokens + lost",
            "return self.drop.tokens",
            "test_spans.py",
        ),
        (
            "a protected start overlaps a dropped span",
            "        found = replace(self, protect=protect)\n        found._require_disjoint()\n",
            "        found = replace(self, protect=protect)\n",
            "test_spans.py",
        ),
        (
            "spans that touch are said to overlap",
            "if before_do and span[0] < before[1]:",
            "if before_do and span[0] <= before[1]:",
            "test_spans.py",
        ),
    ],
}

FAULTS = tuple(
    Fault(file, name, old, new, tuple(suites))
    for file, seeded in _SEEDED.items()
    for name, old, new, *suites in seeded
)
