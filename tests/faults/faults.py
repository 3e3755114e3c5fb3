"""The seeded faults: the text that each replaces in the source, and the suites that notice it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault that replaces a text of the source.

    Attributes:
        file: the path of the source file below the `src` of its package.
        name: what is wrong then.
        old: a text that occurs exactly once in the file.
        new: the text that replaces it.
        suites: the paths of suites below the tests of the package; at least one of them must
            notice.
    """

    file: str
    name: str
    old: str
    new: str
    suites: tuple[str, ...]

    def path_of(self, suite: str) -> Path:
        """Return the path of a suite from the root of the repository."""
        package = Path(self.file).parts[0].replace("_", "-")
        return Path("packages", package, *_BELOW.get(package, ("tests",)), suite)


_BELOW = {"snapkv-vllm": ("tests", "serving")}


def _read(patches: str) -> Iterator[Fault]:
    """Parse faults that are written as text: "= file", and for each fault of this file "@ name |
    suites", followed by the old lines with - and the new ones with + in front.
    """
    for of_file in patches.split("\n= ")[1:]:
        file, *faults = of_file.split("\n@ ")
        for lines in (fault.splitlines() for fault in faults):
            about = (line.strip() for line in lines if line[:1] not in ("-", "+"))
            name, suites = " ".join(about).split(" | ")
            old, new = ("\n".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
            yield Fault(file.strip(), name, old, new, tuple(suites.split()))


_SEEDED = r"""
= snapkv/cache/hybrid.py
@ a state stays in its row where rows change places | matrix/test_matrix.py
-        LinearAttentionLayer.reorder_cache(self, beam_idx)

= snapkv/cache/layer_group.py
@ layers that are unlike choose together | cache/test_layer_group.py
-elif self._next != (prompt.depth, prompt.stack_key):
+elif self._next[0] != prompt.depth:
@ of layers that wait all queries are held | cache/test_layer_group.py
-prompt = replace(prompt, queries=prompt.queries.clone())
+pass

= snapkv/cache/layer.py
@ a branch votes by the queries of the steps that go on without it | hf/test_step_graph.py
-        self.queries.own(tail.drafts)
-        self.store.finalize_step(tail.drafts)
+        self.store.finalize_step(tail.drafts)
@ drafts that may be rejected are quantized | hf/test_captured_drafts.py
-        self.store.finalize_step(tail.drafts)
+        self.store.finalize_step()
@ a branch keeps room that nobody takes back | hf/test_step_graph.py
-        copied.release_append_buffer()
@ notes stay in their row where rows change places | cache/test_layer_state.py
-self.slots, self.state = self.slots.select_rows(beam_idx), self.state.select_rows(beam_idx)
+self.slots = self.slots.select_rows(beam_idx)

= snapkv/cache/queries.py
@ replayed queries do not vote with the next turn | hf/test_step_graph.py
-held.copy_(last_tokens(
+(last_tokens(
@ queries of rejected drafts vote with the next turn | hf/test_captured_drafts.py
-held.copy_(held.roll(tokens, dims=2))
+pass

= snapkv/cache/read_ids.py
@ ids of a part that was taken back in the middle stay | hf/test_read_ids.py
-ids[:, : columns - start]
+ids
@ beams are compared with the ids of another row | hf/test_read_ids.py
-states.repeat_interleave(rows // len(states), dim=0)
+states.repeat(rows // len(states), 1)
@ only the first token that was read is compared | hf/test_read_ids.py
-end = min(first + known.shape[1], start + ids.shape[1], seen)
+end = min(first + known.shape[1], start + ids.shape[1], seen) - 1

= snapkv/cache/prompt_state.py
@ an announced prompt is still to come when it has ended | hf/test_cache.py
-return self.prompt_end is not None and self.seen_tokens < self.prompt_end
+return self.prompt_end is not None and self.seen_tokens <= self.prompt_end
@ an end that was taken back stays announced | sequences/test_sequences.py
-end is not None and end <= seen_before and
+end is not None and end < seen_before and
@ a prompt that failed stays announced | hf/test_generate.py
-                self.prompt_end = before
-                schedule_recall
+                schedule_recall

= snapkv/cache/rows.py
@ a crop keeps as many of the last queries as there are slots | cache/test_layer_state.py
-left = tensor.shape[axes["token_axis"]] - tokens
+left = slots
@ what is only measured counts as held | cache/test_layer_state.py
-self._declared().values() if axes["is_counted"]
+self._declared().values()

= snapkv/cache/saving/encoding.py
@ a saved cache forgets that it must recall | sequences/test_sequences.py
-layer.offloaded.is_due = saved["recall_due"]
+layer.offloaded.is_due = False
@ what lies off the device goes into a file as it came, where few bits were asked for |
  storage/test_coded.py
-parts["offloaded"] = quantize_state(both, codes)
+parts["offloaded"] = tuple(both.values())
@ parts of a file that do not fit together fill a layer | cache/test_saving.py
-    if not fits:
+    if False:
@ a saved cache forgets the states beside its keys | sequences/test_sequences.py
-{"beside": _encode(_saveable(others), name, tensors)} if others else {}
+{}

= snapkv/cache/saving/files.py
@ a saved file may have changed | cache/test_saving.py
-if _digest(file, start) != sealed:
+if len(_digest(file, start)) != len(sealed):
@ a file that is no saved cache is replaced | cache/test_saving.py
-bool(header and _FORMATS.search(header))
+bool(header)

= snapkv/cache/saving/writing.py
@ what another writer is writing is swept away | cache/test_writing.py
-found.stat().st_mtime < oldest
+found.stat().st_mtime > oldest
@ half a line stays where writing it failed | cache/test_writing.py
-                os.ftruncate(descriptor, size)
+                pass
@ a saved file is for its owner alone | cache/test_writing.py
-            partial.chmod(mode)  # safetensors
+            # safetensors
@ a link is replaced by a file | cache/test_writing.py
-Path(os.path.realpath(path))
+Path(os.path.abspath(path))

= snapkv/cache/slots.py
@ what stands behind a dropped span has a position too low | cache/test_spans.py
  sequences/test_sequences.py
-reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous(), right=True)
+reached = torch.searchsorted(begins.contiguous(), places.flatten(1).contiguous())
@ a span that was dropped counts twice for the positions behind it | cache/test_spans.py
  sequences/test_sequences.py
-after = self.removed_spans[..., 0] - (sums - lengths)
+after = self.removed_spans[..., 0] - sums
@ the last pad of a row is seen | cache/test_pads_between_turns.py
-return torch.arange(columns, device=device) >= first
+return torch.arange(columns, device=device) >= first - 1
@ what was noted of slots moves to the slots behind them | golden/test_golden.py
-functional.pad(self.slot_scores, (0, new_tokens))
+functional.pad(self.slot_scores, (new_tokens, 0))
@ tokens that a row was told to drop were never seen | cache/test_spans.py
  sequences/test_sequences.py
-(each.tokens - self.removed_tokens for each in
+(-self.removed_tokens for each in
@ a crop forgets too little of what was dropped | cache/test_spans.py
-Spans(((max(0, seen - tokens), seen),))
+Spans(((max(0, seen - count), seen),))
@ kept tokens behind a dropped span lose the pads of their row | cache/test_spans.py
-places = (ranks + pads[:, None, None])
+places = ranks
@ a row with fewer dropped spans than another ends in empty ones | cache/test_spans.py
-((0, 0),) * (most - len(each.parts)) + each.parts
+each.parts + ((0, 0),) * (most - len(each.parts))

= snapkv/cache/spans.py
@ a layer that drops all that it had evicted counts as compressed | cache/test_spans.py
-            _make_whole(layer)
+            pass
@ queries of dropped tokens vote on the next turn | cache/test_spans.py
-layer.queries.drop(left, positions[:, 0])
+pass
@ spans are protected as if rows had no pads | cache/test_protect.py
-replace(layer.slots, pads=pads).positions_of
+layer.slots.positions_of
@ a span may reach one token beyond what was seen | cache/test_spans.py
-own.parts[-1][1] > seen:
+own.parts[-1][1] > seen + 1:
@ all of a row may be dropped | cache/test_spans.py
-if gone.tokens >= seen:
+if gone.tokens > seen:

= snapkv_app/cli/library.py
@ documents are added in other bits than asked for | cli/test_library.py
-bits=options.bits,
+bits=None,

= snapkv_app/cli/sources.py
@ a document is joined that leaves no position for the answer | cli/test_library.py
-if loaded.has_positions(taken + hit.tokens + options.max_new_tokens):
+if loaded.has_positions(taken + hit.tokens):

= snapkv_app/decoding.py
@ a text in seven bits is read as UTF-8 | app/test_documents.py
-if shift.search(data)), "utf-8")
+if shift.match(data)), "utf-8")
@ a text in UTF-16 without a mark is read in the other order of bytes | app/test_text_files.py
-return "utf-16-be" if first else "utf-16-le"
+return "utf-16-le" if first else "utf-16-be"

= snapkv_app/cli/interrupts.py
@ a command that is interrupted is never said to continue | cli/test_outputs.py
-return any(f"{typed} ".startswith
+return not any(f"{typed} ".startswith

= snapkv_app/cli/chat.py
@ a conversation that goes on is told of the documents of the command line | cli/test_failures.py
-self.conversation, self.warnings = self.load(path), []
+self.conversation = self.load(path)
@ a conversation in a pipe ends with status 0 after a failed question | cli/test_chat.py
-if self.has_failed and not sys.stdin.isatty():
+if self.has_failed and sys.stdin.isatty():

= snapkv_app/cli/outputs.py
@ two options write the same file | cli/test_refusals.py
-if taken.setdefault(real, name) != name:
+if taken.setdefault(real, name) != taken[real]:
@ a file that is an input is replaced with --force | cli/test_outputs.py
-if any(os.path.samestat(status, os.stat(file)) for file in files):
+if False:
@ a file that is there is replaced without --force | cli/test_outputs.py
-if output.is_added_to or not force:
+if output.is_added_to:

= snapkv_app/cli/app.py
@ an error follows an object that was printed as a second one | cli/test_failures.py
-if "--json" in arguments and not output.has_written:
+if "--json" in arguments:
@ of an option that is given twice the last one counts | cli/test_without_torch.py
-if takes_one and (times := given.count(option)) > 1:
+if takes_one and (times := given.count(option)) > 9:
@ a full disk is bad input | cli/test_failures.py
-return _fail(str(error), _FAILURE if is_failure else _BAD_INPUT)
+return _fail(str(error), _BAD_INPUT)

= snapkv_app/cli/changes.py
@ a larger budget is the one that was kept | cli/test_notes.py
-tokens = 2 * max(1, round(answer.kept_tokens))
+tokens = max(1, round(answer.kept_tokens))
@ a changed command repeats the option that it changes | cli/test_notes.py
-if flag not in flags | {"--set"}:
+if flag not in {"--set"}:

= snapkv_app/cli/notes.py
@ a check that found a difference ends with status 0 | cli/test_notes.py
-status=0 if found.same else DIFFERS
+status=0
@ many lost votes that are spread count as few | cli/test_notes.py
-< LITTLE_VOTE and share
+< LITTLE_VOTE or share
@ sampled answers that differ get a command to try next | cli/test_notes.py
-not (found.same or options.temperature)
+not found.same

= snapkv_app/cli/amounts.py
@ a kilobyte has 1,024 bytes | cli/test_amounts.py
-base = 1024 if (found[3] or "").lower() == "ib" else 1000
+base = 1024
@ a negative number counts as positive | cli/test_amounts.py
-return int(whole) * (-1 if sign else 1)
+return int(whole)

= snapkv_app/plan/planner.py
@ what fits is said without the reserve of the device | plan/test_planner.py
-free_bytes = asked.memory_bytes - asked.reserve_bytes
+free_bytes = asked.memory_bytes

= snapkv_app/conversation.py
@ the end token of an answer stands twice before the next turn | app/test_conversation.py
-if is_written and last in end_token_ids
+if is_written and last not in end_token_ids
@ a turn that failed stays in the conversation's cache | app/test_conversation.py
-self.cache = before  #
+pass  #

= snapkv_app/models.py
@ an encoder-decoder is loaded | app/test_models.py
-if config.is_encoder_decoder:
+if False:

= snapkv_app/text_files.py
@ what is missing of a document is not told | app/test_text_files.py
-        if losses:
+        if False:
@ the hidden files of a folder are read | app/test_text_files.py
-for name in files if name[0] != "."]
+for name in files]

= snapkv_app/protection.py
@ a text to protect is read as a regular expression | app/test_protection.py
-re.finditer(re.escape(text), prompt.text)
+re.finditer(text, prompt.text)
@ the token after a protected text is protected too | app/test_protection.py
-if begin < stop and end > start and end > begin
+if begin <= stop and end > start and end > begin

= snapkv_app/prompts.py
@ a question that the document quotes is hidden from its first place on | app/test_answering.py
-removesuffix(self.answer_start).rfind(question)
+removesuffix(self.answer_start).find(question)

= snapkv_app/answering.py
@ an answer that the model ended with its last token is said to be cut off | app/test_answering.py
-"length" if cut_off and not ended else "stop"
+"length" if cut_off else "stop"
@ tokens of the answer count as kept tokens of the prompt | app/test_answering.py
-((at >= 0) & (at < tokens)).sum(-1)
+(at >= 0).sum(-1)
@ a prompt that leaves no position for the answer is read | app/test_answering.py
-loaded.has_positions(prompt_tokens + new_tokens)
+loaded.has_positions(prompt_tokens)
@ the beginning of a stop string is printed | app/test_answering.py
-end = len(self._text) - (0 if stream_end else longest - 1)
+end = len(self._text)
@ answers whose texts begin alike are said to differ at their first token | app/test_answering.py
-for number, (a, b) in enumerate(pairs) if a != b
+for number, (a, b) in enumerate(pairs) if a == b

= snapkv_app/reading.py
@ a prompt is read to its end when the time for it is over | cli/test_passages.py
-if not is_read and needed > end - begin:
+if False:
@ drafts are taken for the prompt, and the answer is begun again | cli/test_passages.py
-is_read = is_read or tokens == of_tokens
+is_read = False

= snapkv_app/library/records.py
@ a passage's last line is the one after it | library/test_searching.py
-return first, first + text.count("\n", start, stop)
+return first, first + text.count("\n", start, stop + 1)
@ passages do not overlap | library/test_searching.py
-range(0, len(words), PASSAGE_WORDS - OVERLAP_WORDS)
+range(0, len(words), PASSAGE_WORDS)

= snapkv_app/library/searching.py
@ a word in half of the passages weighs nothing | library/test_searching.py
-weight = math.log1p(odds) / max(math.log(odds), 1e-6)
+weight = 1.0
@ a word of a question is looked for in its case | library/test_searching.py
-folded(question).lower())
+folded(question))

= snapkv_app/library/bound.py
@ the document that was asked for last is evicted | library/test_bound.py
-if key not in self._stay and key != last]
+if key not in self._stay]
@ documents that were asked for lately are evicted first | library/test_bound.py
-return sorted(free, key=lambda key: (uses.get(key) or self._folder.written_at(key), key))
+return sorted(free, key=lambda key: (self._folder.written_at(key), key))

= snapkv_app/library/folder.py
@ what an adder that was killed has left stays for good | library/test_library.py
-            if is_left:
+            if False:
@ the cache of a removed document stays on the disk | library/test_library.py
-                place.unlink(missing_ok=True)
-            _unlink(self.cache_file(record))
+                place.unlink(missing_ok=True)
@ a library is made among the files of somebody else | library/test_library.py
-        if strangers:
+        if False:

= snapkv_app/library/library.py
@ a document that has changed is not read again | library/test_library.py
-if known is not None and known.sha256 != digest_of(text.text):
+if known is None and text.text == "":
@ a document whose file is damaged is skipped | library/test_library.py
-if self._folder.fault_of(known, checked=False) is None:
+if known is not None:
@ a limit below what is stored evicts documents unasked | library/test_bound.py
-if going and not evict:
+if evict and not going:

= snapkv_app/control_words.py
@ a mark that a text has passes for one of ours | test_control_words.py
-content = content.replace(_MARK, 2 * _MARK)
+content = content
@ a token for what is unknown is a control token | test_control_words.py
-set(control_words(tokenizer).values()) - {tokenizer.unk_token_id}
+set(control_words(tokenizer).values())

= snapkv_lab/evaluate/summary.py
@ a prompt that lost nothing counts as compressed | lab/evaluate/test_summary.py
-each["kept_tokens"] < each["prompt_tokens"]
+each["kept_tokens"] <= each["prompt_tokens"]

= snapkv_lab/measure/timing.py
@ warm-up rounds count | lab/measure/test_timing.py
-of_name[warmup_rounds:]
+of_name[:]

= snapkv_lab/study/measures.py
@ the attention that makes a position important is summed over heads that did not select it |
  lab/study/test_measures.py
-(times * masks).sum(dim=1)
+(times * masks.any(dim=1, keepdim=True)).sum(dim=1)

= snapkv_lab/evaluate/runner.py
@ a limit counts the samples of all cells together | lab/evaluate/test_runner.py
-        taken[cell] += 1
-        if limit is None or taken[cell] <= limit:
+        taken[cell] += 1
+        if limit is None or taken.total() <= limit:
@ answers of another policy under the same label are taken over | lab/evaluate/test_runner.py
-if record["policy"] != json.loads(json.dumps(expected)):
+if expected is None:

= snapkv_lab/evaluate/tasks/needle.py
@ a needle at the end of the text lies after its last whole sentence | lab/evaluate/test_needle.py
-        if depth < 100:
+        if True:
@ words of an answer count towards a sandwich that they do not name | lab/evaluate/test_needle.py
-return len(right & predicted) / len(right)
+return len(right & predicted) / len(predicted)

= snapkv_lab/evaluate/store.py
@ a run continues in the folder of another run | lab/evaluate/test_runner.py
-            if differing:
+            if False:

= snapkv_lab/evaluate/intervals.py
@ a difference is taken from answers to other samples | lab/evaluate/test_summary.py
-return [values[name] for name in names], conversations and
+return list(values.values())[: len(names)], conversations and
@ an interval holds 90 % of the resampled means | lab/evaluate/test_summary.py
-tail = round(RESAMPLES * (1 - LEVEL) / 2)
+tail = round(RESAMPLES * (1 - LEVEL))
@ turns of a conversation are drawn as if they were independent | lab/evaluate/test_summary.py
-draws_of[conversations] = places
+pass

= snapkv_lab/evaluate/metrics.py
@ an answer is scored by the first reference alone | lab/evaluate/test_metrics.py
-return max((metric(prediction, reference) for reference in references), default=0.0)
+return next((metric(prediction, reference) for reference in references), 0.0)
@ words of an answer count as often as they are repeated | lab/evaluate/test_metrics.py
-precision, recall = same / len(predicted), same / len(right)
+precision, recall = same / len(right), same / len(right)
@ a backtick begins code | lab/evaluate/test_metrics.py
-re.search("`|#|//", line)
+re.search("#|//", line)

= snapkv_lab/medusa/tree.py
@ drafts are judged by the token behind them | lab/medusa/test_acceptance.py
-tokens[paths[:, 1:]] == chosen[paths[:, :-1]]
+tokens[paths[:, 1:]] == chosen[paths[:, 1:]]
@ a candidate sees candidates that are no ancestors | lab/medusa
-seen[node] |= seen[parent]
+seen[node] |= seen[: parent + 1].any(dim=0)

= snapkv/hf/attend.py
@ queries of a group are masked as their neighbours | hf/test_attend.py
-mask.repeat(1, 1, Hq // Hkv, 1)
+mask.repeat_interleave(Hq // Hkv, dim=2)
@ heads of different length see every branch | hf/test_branches.py
-visible = None if call.branches is None else call.branches.own_visible
+visible = None

= snapkv/hf/attention.py
@ spans are protected by columns while an answer grows | cache/test_protect.py
-positions = columns if pads is None else columns - pads[:, None, None]
+positions = columns

= snapkv/hf/forward_context.py
@ a prompt's last token counts as decoding | hf/test_phases.py
-seen_tokens - new_tokens >= prompt_end
+seen_tokens - new_tokens >= prompt_end - 1
@ a refused pass leaves its tokens | hf/test_cache.py
-        layer.crop(-self.forward_pass.new_tokens)
@ branches are still being read when they are over | hf/test_branches.py
-        current.branches = None
+        pass
@ layers that share keys attend by what the first of them has become | sequences/test_sequences.py
-layer=copy.copy(layer))
+layer=layer)

= snapkv/hf/generate.py
@ a prompt that was read ends the wait of prompts in other threads | hf/test_install.py
-        if split.waiting:
-            return
-
@ a prompt and its drafts are read in one pass | hf/test_generate.py
-behind := prompt_state.tokens_behind(tokens)
+behind := 0 * prompt_state.tokens_behind(tokens)
@ a method that decodes by itself loses its streamer | hf/test_install.py
-arguments |= {"streamer": modes[-1]} if streams else {}
+arguments |= {}
@ new ids alone pass for all of a text | hf/test_generate.py
-kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))
+kwargs.get("inputs_embeds"))
@ a turn that is announced in the midst is replayed as a step | hf/test_step_graph.py
-            steps.close()
-        else:
+            pass
+        else:
@ a copied model announces to the first one's caches | hf/test_install.py
-memo.get(id(self.model), self.model)
+self.model

= snapkv/hf/identity.py
@ other weights of a model are not told from its own | cache/test_saving.py
-torch.linspace(0, last, count, dtype=torch.float64)
+torch.zeros(0)

= snapkv/hf/install.py
@ a model that goes takes the config of another with it | hf/test_install.py
-if not any(config is known for other in _known for known in other._configs):
+if config is not None:
@ a model without caches loses what was installed | hf/test_install.py
-return bool(self.caches or self.installs)
+return bool(self.caches)
@ uninstall leaves an install that was not undone | hf/test_install.py
-        installation.installs.clear()

= snapkv/hf/masks.py
@ no mask hides what is at most as low as half | hf/test_masks.py
-masked_fill(~allowed, lowest)
+masked_fill(~allowed, lowest / 4)
@ a mask is shifted in its columns alone | hf/test_masks.py
-mask_function(batch, head, query + rows, slot + columns)
+mask_function(batch, head, query, slot + columns)

= snapkv/hf/cache.py
@ other passes are read into room that was lent for a step | hf/test_step_graph.py
-        if prompt_state.layers[0].store.has_room and not current.is_step:
+        if False:

= snapkv/hf/append_buffers.py
@ room that runs out is not made larger | hf/test_step_graph.py
-fits = is_lent and self._used.tokens + new_tokens <= self._used.slots
+fits = is_lent
@ a step goes on as recorded where the cache was changed | hf/test_step_graph.py
-fits = is_lent and self._used
+fits = self._used
@ rejected drafts stay in buffers of recorded passes | hf/test_captured_drafts.py
-            self._used.remove(tokens)
+            pass
@ a rejected draft gives up what was recorded | hf/test_captured_drafts.py
-if not self.is_lent or tokens >= max(1, self._used.drafts):
+if not self.is_lent or tokens:
@ older queries are missing after a long draft | hf/test_captured_drafts.py
-        return fits and queries.can_write_back(new_tokens if new_tokens > 1 else 0)
+        return fits

= snapkv/hf/step_graph.py
@ queries of the step that is tried vote | hf/test_step_graph.py
-                held.copy_(states)
+                pass
@ all steps hand out the same output | hf/test_step_graph.py
-tree_map_only(Tensor, torch.clone,
+tree_map_only(Tensor, lambda made: made,
@ a step is recorded of a model in training | hf/test_step_graph.py
-if model.training:
+if not model.training and False:
@ a step is recorded of a model with hooks | hf/test_step_graph.py
-if not all(map(_is_known, hooks)) or
+if

= snapkv_app/library/joining.py
@ a joined document's keys stand one position off | library/test_blending.py
-torch.full((1, 1), step,
+torch.full((1, 1), step + 1,

= snapkv/ops/codes/coding.py
@ codes are a step too fine | ops/test_codes.py
-steps = [2**bits - 1 for _, bits, _ in parts]
+steps = [2**bits for _, bits, _ in parts]
@ the two codes of a byte change places | ops/test_codes.py
-low, high = numbers.unbind
+high, low = numbers.unbind

= snapkv/ops/codes/layout.py
@ tokens of an unfilled block of codes are attended to | ops/test_codes.py
-for slot in range(count, G)]
+for slot in range(count + 1, G)]
@ tokens that are encoded behind a prompt stand before it | ops/test_codes.py
-BlockLayout((*self.sections, section)
+BlockLayout((section, *self.sections)

= snapkv/ops/ragged/inputs.py
@ ragged attention lets a token see the next one | ops/test_ragged.py
-hidden = slots >= own
+hidden = slots > own
@ ragged attention sees slots of a buffer that nothing is written to | ops/test_ragged.py
-end = S if self.tail_tokens is None else self.tail_tokens
+end = S

= snapkv/ops/ragged/layout.py
@ the last edge of ragged heads is read as a whole block | ops/test_ragged.py
-(edges if offset or block == whole else blocks)
+(edges if offset and block < whole else blocks)

= snapkv/ops/redundancy.py
@ the oldest of similar keys is exempt | policies/test_rkv.py
-similar.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1)
+similar.cumsum(dim=-1, dtype=torch.int32)

= snapkv/ops/votes/blocked.py
@ in blocks, a query of the window does not see its own token | ops
-ahead.triu_(tokens - W - first + 1)
+ahead.triu_(tokens - W - first)
@ in blocks, the cap of scores is not scaled back | ops
-.tanh_().mul_(softcap)
+.tanh_()
@ heads are gathered from the KV head of another group | sequences/test_sequences.py ops
-.view(B, Hs, heads // Hs, -1) + begins
+.view(B, heads // Hs, Hs, -1).transpose(1, 2) + begins
@ in blocks, a sink's share of the softmax is forgotten | ops
-carried: Tensor | float = 1.0
+carried: Tensor | float = 0.0

= snapkv/ops/votes/by_head.py
@ by head, the cap of scores is not scaled back | ops/test_blocked.py
-slope = softcap * _LOG2_E
+slope = _LOG2_E
@ by head, the mean over a group is its sum | ops/test_blocked.py
-        votes /= G
+        pass

= snapkv/ops/votes/reference.py
@ a query of the window does not see its own token | ops
-positions <= positions[prompt_tokens - window_tokens :, None]
+positions < positions[prompt_tokens - window_tokens :, None]
@ query heads vote for the KV head of another group | ops
-grouped = votes.view(B, num_kv_heads, Hq // num_kv_heads, P)
+grouped = votes.view(B, Hq // num_kv_heads, num_kv_heads, P).transpose(1, 2)
@ votes are pooled forward instead of backward | ops
-F.pad(votes, (behind, before), value=outside)
+F.pad(votes, (before, behind), value=outside)
@ a vote fades twice as fast | ops
-decay * last)
+decay * decay * last)

= snapkv/ops/votes/top_k.py
@ of equal votes the higher position wins | ops
-(tied.cumsum(dim=-1) <= room)
+(tied.flip(-1).cumsum(dim=-1).flip(-1) <= room)
@ of equal votes the higher position wins, where rows keep different numbers |
  policies/test_selection_contract.py ops
-torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]
+(scores.shape[-1] - 1 - torch.sort(scores.flip(-1), dim=-1,
+descending=True, stable=True).indices[..., :most])
@ one pad of a row can win | policies/test_selection_contract.py ops
-order < pad_tokens[:, None, None] + first_tokens
+order < pad_tokens[:, None, None] + first_tokens - 1

= snapkv/policies/across_layers.py
@ the window counts against what all layers share | policies/test_across_layers.py
-map(operator.add, self.policy.counts(prefix), prefix.window_tokens)
+map(operator.pos, self.policy.counts(prefix))
@ tokens that fill a block of codes in part are kept, too | policies/test_across_layers.py
-found = torch.full_like(ranked, -math.inf)
+found = torch.full_like(ranked, math.inf)

= snapkv/cache/shared_budget.py
@ layers share out a token too few | policies/test_across_layers.py
-return [sum(map(operator.mul, heads, map(max, row, least))) for row in rows]
+return [sum(map(operator.mul, heads, map(max, row, least))) - 1 for row in rows]
@ layers are pruned to half of what they share | policies/test_across_layers.py
-if group.reaches_last or most_held > 2 * max(budgets):
+if most_held > max(budgets) // 2:
+            budgets = budgets if group.reaches_last else [n // 2 for n in budgets]

= snapkv/ops/ragged/flash.py
@ what heads keep weighs as if the tail were less | ops/test_ragged.py
-share = (kept - tailed).sigmoid_()[..., None]
+share = (kept - 0.9 * tailed).sigmoid_()[..., None]

= snapkv/policies/budget.py
@ the top layer of a pyramid keeps most | policies/test_uneven.py
-bottom - (bottom - top) * depth / steps
+top + (bottom - top) * depth / steps
@ AdaKV shares out a token too few | policies/test_uneven.py
-order[: total - sum(whole)]
+order[: total - sum(whole) - 1]
@ of equal remainders the larger share is rounded up | policies/test_uneven.py
--round(shares[i] - whole[i], 9), shares[i], i)
+-round(shares[i] - whole[i], 9), -shares[i], i)
@ the most that the votes may choose has no window | policies/test_auto_budget.py
-self.most - prefix.window_size
+self.most
@ votes on a long prompt need as much as on a short one | policies/test_auto_budget.py
-.clamp(min=1.0)
+.clamp(max=1.0)

= snapkv/policies/criticalkv.py
@ values are weighed by the next group's projection | policies/test_values.py
-b[:, head // group] @
+b[:, (head + 1) % heads // group] @

= snapkv/policies/expected_attention.py
@ queries of sinks count | policies/test_values.py
-(positions >= self.sink_tokens)[:, None, :, None]
+(positions >= 0)[:, None, :, None]

= snapkv/policies/fastgen.py
@ a marker at the end of the text is not found | policies/test_fastgen.py
-starts = token_ids.shape[1] - len(marker) + 1
+starts = token_ids.shape[1] - len(marker)

= snapkv/policies/h2o.py
@ H2O forgets what tokens received before | policies/test_evicting.py
-step.scores + self.rate(step)
+self.rate(step)

= snapkv/policies/lagkv.py
@ a piece is scaled by the piece before it | policies/test_lagkv.py
-        lag = pieces[:, 1:]
+        lag = pieces[:, :-1]

= snapkv/policies/rkv.py
@ the window is redundant, too | policies/test_rkv.py
-scores[..., : -self.window_size] += self.mix_lambda * importance
+scores[..., : -self.window_size] += importance

= snapkv/policies/scissorhands.py
@ the lowest layer has the largest budget | policies/test_scissorhands.py
-budget * (1 - gamma), budget * (1 + gamma)
+budget * (1 + gamma), budget * (1 - gamma)

= snapkv/policies/spans.py
@ spans that touch stay apart | policies/test_spans.py
-if merged and start <= merged[-1][1]:
+if merged and start < merged[-1][1]:
@ a span is shifted by one token | policies/test_spans.py
-positions.long().contiguous(), right=True)
+positions.long().contiguous(), right=False)

= snapkv/token_cost.py
@ a share is taken of what a float makes of it | policies/test_uneven.py
-int(Fraction(str(share)) * tokens)
+int(share * tokens)
@ bytes that are left over go to the last layers | policies/test_byte_budget.py
-more = -blocks * depth // layers - -blocks * (depth + 1) // layers
+more = blocks * (depth + 1) // layers - blocks * depth // layers
@ what heads may fill in part of a block is not set aside | policies/test_byte_budget.py
-return more * self.block_tokens - self.spare_tokens
+return more * self.block_tokens

= snapkv/policies/tova.py
@ TOVA lets one head decide for all | policies/test_evicting.py
-weights[:, :, -1].mean(dim=1, keepdim=True)
+weights[:, :1, -1]

= snapkv/storage/base.py
@ sinks are turned from where they were turned to before | policies/test_streaming.py
-sinks = torch.where(were_moved, original, sinks)
+sinks = torch.where(were_moved, sinks, sinks)

= snapkv/storage/lent_tail.py
@ room that nothing is written to holds numbers | storage/test_lent_tail.py
-states.new_zeros(
+states.new_ones(
@ a token with room is written over the one before | storage/test_lent_tail.py
-self.on_device.add_(tokens)
+self.on_device.add_(0)
@ masks begin behind the tokens in front of the buffer | hf/test_captured_drafts.py
-return self._used.on_device + self._first
+return self._used.on_device * 0 + self._first
@ a rejected token stays in its slot | storage/test_lent_tail.py
-states[:, :, self.tokens : self.tokens + slots] = 0
+pass
@ the number of tokens is frozen in what is recorded | hf/test_captured_drafts.py
-used, self._tokens = self.tokens, None
+used = self.tokens

= snapkv/storage/offload.py
@ a later turn is offloaded together with what is there | cache/test_recall.py
-whole.keys[:, :, done:tokens], whole.values[:, :, done:tokens]
+whole.keys[:, :, :tokens], whole.values[:, :, :tokens]
@ offloaded tokens come back that were taken back | sequences/test_sequences.py
-end=min(piece.end, tokens)
+end=piece.end
@ offloaded rows keep the pads of other rows | sequences/test_sequences.py
-rows=piece.rows[rows], shift=piece.shift[rows]
+rows=piece.rows[rows]
@ the limit off the device is held to one layer alone | cache/test_recall.py
-self.taken_bytes += wanted
+self.taken_bytes = wanted
@ dropping spans needs more room off the device | cache/test_spans.py
-left.append(keys, values, on=stays.device, is_limited=False)
+left.append(keys, values, on=stays.device)

= snapkv/storage/ragged.py
@ the first token of a ragged head is taken for none | sequences/test_sequences.py
-slots >= both[..., 1]
+slots > both[..., 1]
@ ragged rows keep the lengths of other rows | sequences/test_sequences.py
-tuple(self.head_tokens[row] for row in rows.tolist())
+tuple(self.head_tokens[row] for row in sorted(rows.tolist()))

= snapkv/storage/ragged_store.py
@ heads hold a token that was taken back | storage/test_coded.py
-[..., : heads.longest_tokens - own])
+[..., : heads.longest_tokens - own + 1])

= snapkv/storage/tail.py
@ the append buffer writes over the last token that it handed out | storage/test_tail.py
-stored.as_strided(new.shape, strides, S * D)
+stored.as_strided(new.shape, strides, (S - 1) * D)
@ a copy of a cache is written over by the other | storage/test_tail.py
-self.keys, self.values, self._room = keys, values, 0
+self.keys, self.values = keys, values
@ a crop leaves the values of the tokens behind | hf/test_cache.py
-self.hold(self.keys[:, :, :left], self.values[:, :, :left])
+self.hold(self.keys[:, :, :left], self.values[:, :, tokens:])

= snapkv_vllm/versions.py
@ the version after the last one that is supported is taken | test_versions.py
-(int(found[1]), int(found[2])) < NEXT
+(int(found[1]), int(found[2])) <= NEXT

= snapkv_vllm/front/streams.py
@ a stream that is refused has status 200 | test_streams.py
-400 <= code < 600 else 500
+400 <= code < 600 and False else 200

= snapkv_vllm/front/question.py
@ of a question's tokens the first is missing | test_question.py
-if size >= len(tail))
+if size > len(tail) - 2)

= snapkv_vllm/front/bodies.py
@ a setting that is given twice takes the one outside | test_bodies.py
-for name in moved.keys() & xargs.keys():
+for name in ():
@ a body that names two sessions takes the second one | test_bodies.py
-if hinted is not None and hinted != direct:
+if False:

= snapkv_vllm/blocks.py
@ vLLM's blocks: a request counts rounded room as dropped | vllm/test_accounting.py
-self.dropped_tokens[request_id] = order.seen_tokens - reserved
+self.dropped_tokens[request_id] = order.dropped_tokens - 1
@ vLLM's blocks: kept tokens are written into blocks that others share | vllm/test_accounting.py
-return bool(self.enable_caching) and
+return not self.enable_caching and

= snapkv_vllm/heads.py
@ a head's last full page lies behind the others' | heads/test_places.py
-torch.where(pages < first,
+torch.where(pages < first - 1,
@ a page that is not full has no place | heads/test_places.py
-pages = -(-self.kept // self.page_tokens)
+pages = self.kept // self.page_tokens
@ rows between others are taken for the first of a batch | heads/test_step.py
-max(batch.counts) == 1 and tuple(batch.starts) == tuple(range(len(batch.starts)))
+max(batch.counts) == 1

= snapkv_vllm/kept_lengths.py
@ vLLM is told the slots of tokens that were dropped | test_kept_lengths.py
-right=True
+right=False

= snapkv_vllm/admission/limits.py
@ a budget may be as long as the time between two evictions | test_limits.py
-if 0 < self.decode_budget <= every:
+if 0 < self.decode_budget < every:

= snapkv_vllm/admission/plans.py
@ a window puts queries aside that earlier steps have put aside | test_plans.py
-first = max(seen_tokens, trigger - compression.selector.query_tokens)
+first = trigger - compression.selector.query_tokens
@ an answer may hold a token too many before it is cut | test_plans.py
-seen - held + limit.max_tokens - 1) + 1
+seen - held + limit.max_tokens) + 1
@ an eviction drops a token too few | test_plans.py
-kept = limit.max_tokens - limit.evict_every
+kept = limit.max_tokens - limit.evict_every + 1
@ an answer that has just begun is asked for queries of its prompt | test_plans.py
-min(count_eviction_queries(limit.policy), due - self.prompt_tokens)
+count_eviction_queries(limit.policy)
@ a cached prefix is reused up to the prompt's last token, so that voters are missing |
  vllm/test_scheduling.py
-max(0, first.trigger_tokens - max(1, first.selector.query_tokens))
+max(0, first.trigger_tokens - 1)

= snapkv_vllm/runners.py
@ vLLM's rows: a resumed request goes on with what it held before | vllm/test_scheduling.py
-        *(scheduler_output.preempted_req_ids or ()),
-        *scheduler_output.scheduled_cached_reqs.resumed_req_ids,

= snapkv_vllm/histories.py
@ a request goes on in a block that another request writes | test_digested_tokens.py
-return 0 if self.requests else same
+return same
@ a prompt that leaves a history before its last compression takes its blocks |
  test_digested_tokens.py
-if same < max(1, prefix.tokens):
+if same < 1:
@ a span that keeps what was dropped is said to be there | test_digested_tokens.py
-if spans.overlap(compressed).without(self.protected).parts:
+if False:
@ tokens of the same digest are one block more | test_digested_tokens.py
-return blocks * BLOCK + (int(differ[0])
+return blocks * BLOCK + BLOCK + (int(differ[0])
@ who has least gives back first | test_shares.py
-max(beyond, key=lambda one: taken[one.tenant])
+min(beyond, key=lambda one: taken[one.tenant])
@ what is within a tenant's share goes | test_shares.py
-taken[one.tenant] > share]
+taken[one.tenant] >= share]

= snapkv_vllm/admission/spans.py
@ the last token of a prompt may be dropped | test_spans.py
-DROP: (prompt_tokens - 1,
+DROP: (prompt_tokens,
@ a dropped span counts without what was compressed | test_spans.py
-return self.drop.tokens + lost
+return self.drop.tokens
@ a protected start overlaps a dropped span | test_spans.py
-        found = replace(self, protect=protect)
-        found._require_disjoint()
+        found = replace(self, protect=protect)
@ spans that touch are said to overlap | test_spans.py
-if before_do and span[0] < before[1]:
+if before_do and span[0] <= before[1]:
"""

FAULTS = tuple(_read(_SEEDED))
