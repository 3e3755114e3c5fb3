// The two sentences and the answers, the slider of the budget, and the map of the text.

const byId = (id) => document.getElementById(id);

class View {
  constructor(data) {
    this.data = data;
    this.words = new Words(data.pieces);
    this.pane = new TextPane(this.words, (token) => this.say(token));
    byId("map").append(this.pane.element);
    byId("budget").addEventListener("input", () => this.draw());
    byId("method").addEventListener("change", () => this.choose());
    byId("method").append(...data.methods.map(({ label }, i) => new Option(label, String(i))));
    byId("method-label").hidden = data.methods.length < 2;
    byId("search").addEventListener("submit", (event) => this.search(event));
  }

  choose() {
    this.method = this.data.methods[Number(byId("method").value)];
    this.ballot = this.method.ballot ? new Ballot(this.method.ballot) : null;
    const { stops, chosen } = this.method;
    byId("stops").hidden = stops.length < 2;
    byId("budget").max = String(stops.length - 1);
    byId("budget").value = String(chosen);
    byId("marks").replaceChildren(...stops.map((stop) => made("span", { class: stop.answer?.same ? "same" : "other" }, `${stop.answer?.same ? "✓" : "≠"} ${stop.label}`)));
    this.voters = new Map();
    if (this.ballot) for (let i = this.ballot.first; i < this.ballot.tokens; i += 1) this.voters.set(i, made("span", {}, shown(this.words.pieces[i])));
    byId("voters").replaceChildren(...this.voters.values());
    byId("voting").hidden = !this.ballot;
    byId("map-title").textContent = this.ballot ? "Kept tokens, and who voted for them" : "Kept tokens";
    this.draw();
  }

  draw() {
    this.stop = this.method.stops[Number(byId("budget").value)];
    const { label, sentences, answer, heads } = this.stop;
    const bins = new Uint16Array(decoded(this.stop.counts).buffer);
    this.counts = (token) => bins[Math.floor(token / this.data.bin_tokens)];
    byId("kept").textContent = sentences[0];
    byId("verdict").textContent = sentences[1];
    byId("verdict").className = answer?.same === undefined ? "legend" : answer.same ? "same" : "other";
    byId("budget").setAttribute("aria-valuetext", `${label}: ${sentences[0]} ${sentences[1]}`);
    for (const [i, mark] of [...byId("marks").children].entries()) mark.classList.toggle("at", i === Number(byId("budget").value));
    byId("answers").replaceChildren(...this.answers(answer));
    this.pane.shade((token) => this.counts(token) / heads);
    this.pane.draw();
    this.say(this.pane.current);
  }

  answers(answer) {
    const { full } = this.data;
    if (full === null) return answer ? [card("Answer", answer.text.trim())] : [];
    if (answer.same) return [card("Answer", full.trim())];
    return [card("Full cache", full.trim()), card(this.method.label, ...newWords(answer.changes))];
  }

  // What is known of the token under the pointer or the cursor.
  say(token) {
    const { counts, stop, ballot, words } = this;
    const kept = `${JSON.stringify(words.pieces[token])}: kept by ${counts(token)} of ${stop.heads} heads`;
    const most = ballot ? ballot.of(token) : [];
    byId("status").textContent = [kept, this.reason(token, most)].filter(Boolean).join("; ");
    for (const [voter, element] of this.voters) {
      const vote = most.find((one) => one.token === voter);
      element.className = vote ? `k${Math.max(1, Math.round((8 * vote.part) / most[0].part))}` : "";
    }
  }

  reason(token, most) {
    const { ballot, method, words } = this;
    if (!ballot) return method.unvoted;
    if (token >= ballot.tokens) return "read after the votes";
    if (token < ballot.sink_tokens) return "always kept, as one of the first tokens";
    if (token >= ballot.tokens - ballot.window_tokens) return "always kept, as one of the last tokens";
    if (!most.length) return "no votes";
    return `most votes from ${most.map((one) => `${JSON.stringify(words.pieces[one.token])} (${percentText(one.part)})`).join(", ")}`;
  }

  search(event) {
    event.preventDefault();
    const token = this.words.find(byId("find").value, this.pane.current);
    byId("found").textContent = token < 0 ? "not found" : `token ${numberText(token)}`;
    if (token >= 0) this.pane.show(token);
  }
}

function card(label, ...words) {
  return made("section", { class: "card", "aria-label": `Answer, ${label}` }, made("h2", {}, label),
    made("p", { class: "said", tabindex: "0", role: "group", "aria-label": `Answer, ${label}` }, ...words));
}

// A compressed answer, in which the words are marked that the full cache's has not.
function newWords(changes) {
  const parts = changes.filter(([kind]) => kind !== "gone");
  return parts.flatMap(([kind, text]) => {
    const words = text.trimStart();
    return kind === "new" ? [text.slice(0, text.length - words.length), made("ins", {}, words)] : [text];
  });
}

function facts(request) {
  const rows = Object.entries(request).filter(([, value]) => value !== null);
  return made("table", {}, ...rows.map(([name, value]) => made("tr", {}, made("th", { scope: "row" }, name),
    made("td", {}, typeof value === "string" ? value : JSON.stringify(value)))));
}

function start() {
  const began = performance.now();
  const data = JSON.parse(byId("data").textContent);
  document.title = data.title;
  byId("title").textContent = data.title;
  byId("question").textContent = data.question;
  byId("question").hidden = !data.question;
  byId("facts").append(facts(data.request));
  const view = new View(data);
  view.choose();
  view.pane.layOut();
  view.pane.show(view.ballot?.strongest ?? 0);
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { view.pane.layOut(); view.pane.show(view.pane.current); }, 150);
  });
  document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
}

start();
