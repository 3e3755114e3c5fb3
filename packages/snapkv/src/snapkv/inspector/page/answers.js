// Answers next to the full cache's: what they cost, and which words differ.

// Both sides of a difference have labels for screen readers.
const CHANGES = { gone: ["del", "only the full cache: "], new: ["ins", "only here: "] };

function changed(answer) {
  const parts = answer.changes.flatMap(([kind, text], i) => {
    const shown = i + 1 < answer.changes.length ? text : text.trimEnd();
    if (kind === "same") return [shown];
    const [name, spoken] = CHANGES[kind];
    const words = shown.trimStart();
    const lead = shown.slice(0, shown.length - words.length);
    return [lead, made(name, {}, made("span", { class: "heard" }, `[${spoken}`), words, made("span", { class: "heard" }, "]"))];
  });
  return made("p", { class: "said", tabindex: "0", role: "group", "aria-label": "Answer" }, ...parts);
}

function verdict(answer) {
  return made("span", { class: `badge ${answer.same ? "same" : "other"}` }, answer.same ? "✓ same answer" : "≠ other answer");
}

function heldText(answer) {
  return `${bytesText(answer.held_bytes)} of ${bytesText(answer.full_bytes)} held (${percentText(answer.held_bytes / answer.full_bytes)})`;
}

function meter(share) {
  const filled = made("span", {});
  filled.style.width = `${100 * share}%`;
  return made("span", { class: "meter", "aria-hidden": "true" }, filled);
}

function answerCard(label, answer, method) {
  const perToken = answer.token_ms === null ? "" : `, ${numberText(answer.token_ms)} ms per token`;
  const kept = method?.kept;
  return made("section", { class: "card", "aria-label": `Answer, ${label}` },
    made("header", {}, made("h3", {}, label), ...(method ? [verdict(answer)] : [])),
    changed(answer), meter(answer.held_bytes / answer.full_bytes), made("p", {}, heldText(answer)),
    ...(kept ? [made("p", {}, keptText(kept))] : []),
    made("p", { class: "quiet" }, `first token after ${(answer.first_token_ms / 1000).toFixed(1)} s${perToken}`));
}

function keptText(kept) {
  if (!kept.share) return "No head keeps any part that the answer needs";
  const most = kept.share >= 1 ? "For each part that the answer needs, at least one head keeps all of it" : `Of each part that the answer needs, the best head keeps ${percentText(kept.share)} on average`;
  return `${most}; on average ${numberText(kept.heads)} of ${kept.of_heads} heads keep each of its tokens`;
}
