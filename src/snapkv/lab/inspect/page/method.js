// Everything about one method: text, token under the cursor, votes, and where the kept tokens stand.

const DETAIL_TOKENS = 160;
const HISTOGRAM_BINS = 64;

function figure(canvas, caption) {
  return made("figure", {}, canvas, made("figcaption", {}, caption));
}

class MethodView {
  constructor(method, words, onMove) {
    this.method = method;
    this.words = words;
    this.kept = new Kept(method, words.pieces.length);
    this.pane = new TextPane(words, `Prompt as ${method.label} kept it`, onMove);
    this.status = made("p", { class: "status", "aria-live": "polite" });
    this.overview = made("canvas", { role: "img", class: "overview" });
    this.detail = made("canvas", { role: "img", class: "detail" });
    this.histogram = made("canvas", { role: "img", class: "low histogram" });
    this.chosenHead = made("h4", {});
    this.layers = made("div", { class: "layers", tabindex: "0", role: "region", "aria-label": `Kept share per layer, ${method.label}` });
    this.overview.addEventListener("click", (event) => {
      onMove(Math.min(words.pieces.length - 1, Math.floor((event.offsetX / this.overview.clientWidth) * words.pieces.length)));
    });
    this.element = made(
      "article", { class: "method", "aria-label": method.label },
      made("h3", {}, method.label), this.pane.element, this.status, this.chosenHead,
      figure(this.overview, "The whole prompt from left to right: votes (dark), pooled votes (light), the lowest pooled vote that was kept (dashed), kept tokens (below)."),
      figure(this.detail, `${DETAIL_TOKENS} tokens around the current one.`),
      figure(this.histogram, "Where the kept tokens stand: the share that is kept of each part of the prompt."),
      this.layers,
    );
  }

  place(layer) {
    return this.method.layers.findIndex((one) => one.layer === layer);
  }

  choose(layer, head) {
    this.at = { place: layer < 0 ? -1 : this.place(layer), head };
    if (this.at.place >= 0 && head >= this.kept.heads(this.at.place)) this.at.head = -1;
    const { counts, heads } = this.kept.chosen(this.at.place, this.at.head);
    this.pane.shade(counts, heads);
    this.drawHistogram(counts, heads);
    this.drawLayers();
    this.show(this.pane.current);
  }

  // Votes belong to one head: the first of those that are chosen.
  drawVotes() {
    const place = Math.max(0, this.at.place);
    const head = Math.max(0, this.at.head);
    const layer = this.method.layers[place];
    const tokens = this.words.pieces.length;
    const first = Math.max(0, Math.min(this.pane.current - DETAIL_TOKENS / 2, tokens - DETAIL_TOKENS));
    const around = { from: first, to: Math.min(tokens, first + DETAIL_TOKENS) };
    const view = {
      votes: this.kept.levels("votes", place, head),
      scores: this.kept.levels("scores", place, head),
      binTokens: this.method.bin_tokens,
      cut: layer.cuts ? layer.cuts[head] : null,
      bits: this.kept.bits(place),
      offset: head * this.kept.stride,
    };
    const scale = layer.logarithmic ? "each quarter of the height is a factor of about 30" : "even scale from the lowest to the highest";
    this.chosenHead.textContent = view.scores
      ? `Votes of layer ${layer.layer}, head ${head} (${scale})`
      : `Layer ${layer.layer}, head ${head}: this method shows no scores`;
    const label = `Layer ${layer.layer}, head ${head} keeps ${numberText(layer.kept_tokens[head])} of ${numberText(tokens)} tokens`;
    this.overview.setAttribute("aria-label", `${label}, over the whole prompt`);
    this.detail.setAttribute("aria-label", `${label}; tokens ${around.from} to ${around.to - 1}`);
    drawVotes(this.overview, { ...view, from: 0, to: tokens, mark: around });
    const current = { from: this.pane.current, to: this.pane.current + 1 };
    drawVotes(this.detail, { ...view, ...around, mark: current });
  }

  drawHistogram(counts, heads) {
    const bins = Math.min(HISTOGRAM_BINS, counts.length);
    const shares = new Array(bins).fill(0);
    for (let bin = 0; bin < bins; bin += 1) {
      const first = Math.floor((counts.length * bin) / bins);
      const last = Math.floor((counts.length * (bin + 1)) / bins);
      for (let token = first; token < last; token += 1) shares[bin] += counts[token];
      shares[bin] /= (last - first) * heads;
    }
    const parts = [0, 1, 2, 3].map((quarter) => {
      const some = shares.slice((bins * quarter) / 4, (bins * (quarter + 1)) / 4);
      return percentText(some.reduce((sum, share) => sum + share, 0) / Math.max(1, some.length));
    });
    this.histogram.setAttribute("aria-label", `Kept of the four quarters of the prompt: ${parts.join(", ")}`);
    drawBars(this.histogram, shares);
  }

  // The same for every choice, so drawn once.
  drawLayers() {
    if (this.layers.hasChildNodes()) return;
    const tokens = this.words.pieces.length;
    const rows = this.method.layers.map((layer) => {
      const mean = layer.kept_tokens.reduce((sum, kept) => sum + kept, 0) / layer.kept_tokens.length;
      const bar = made("span", { class: "bar" });
      bar.style.width = `${(100 * mean) / tokens}%`;
      const cell = made("td", { class: "barred" }, bar);
      const least = numberText(Math.min(...layer.kept_tokens));
      const most = numberText(Math.max(...layer.kept_tokens));
      return made("tr", {}, made("th", { scope: "row" }, layer.layer), made("td", {}, percentText(mean / tokens)),
        made("td", {}, least === most ? least : `${least} to ${most}`), cell);
    });
    const head = made("tr", {}, ...["layer", "share", "tokens per head", ""].map((text) => made("th", { scope: "col" }, text)));
    this.layers.append(made("table", {}, made("caption", {}, "Kept of every layer"), made("thead", {}, head), made("tbody", {}, ...rows)));
  }

  show(token) {
    this.pane.show(token);
    const { counts, heads } = this.kept.chosen(this.at.place, this.at.head);
    const text = JSON.stringify(this.words.pieces[token]);
    const needed = this.words.needed[token] ? ", in a part that the answer needs" : "";
    this.status.textContent = `token ${numberText(token)} ${text}: kept by ${counts[token]} of ${heads} ${heads === 1 ? "head" : "heads"}${needed}`;
    this.drawVotes();
  }
}
