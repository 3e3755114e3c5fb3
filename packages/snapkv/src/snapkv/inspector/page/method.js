// Everything about one method: text, token under the cursor, votes, positions of the kept tokens.

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
    this.votes = new VotesView(method, this.kept, words, onMove);
    this.histogram = made("canvas", { role: "img", class: "low histogram" });
    this.layers = made("div", { class: "layers", tabindex: "0", role: "region", "aria-label": `Kept share per layer, ${method.label}` });
    this.element = made(
      "article", { class: "method", "aria-label": method.label },
      made("h3", {}, method.label), made("p", { class: "quiet" }, method.sentence), this.pane.element, this.status, this.votes.element,
      made("h4", {}, "Positions of the kept tokens"),
      figure(this.histogram, "Kept share along the prompt, from its beginning to its end."),
      this.layers,
    );
    this.drawLayers();
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
    this.show(this.pane.current);
  }

  scale(linear) {
    this.votes.linear = linear;
    this.votes.draw(this.at, this.pane.current);
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

  // Adjacent layers that keep equally many tokens share a row; a uniform method has one row.
  drawLayers() {
    const tokens = this.words.pieces.length;
    const runs = [];
    for (const { layer, kept_tokens: kept } of this.method.layers) {
      const mean = kept.reduce((sum, one) => sum + one, 0) / kept.length;
      const one = { first: layer, last: layer, mean, least: Math.min(...kept), most: Math.max(...kept) };
      const before = runs.at(-1);
      const same = before && ["mean", "least", "most"].every((name) => before[name] === one[name]);
      if (same) before.last = layer; else runs.push(one);
    }
    const rows = runs.map(({ first, last, mean, least, most }) => {
      const bar = made("span", { class: "bar" });
      bar.style.width = `${(100 * mean) / tokens}%`;
      const number = least === most ? numberText(least) : `${numberText(least)} to ${numberText(most)}`;
      const name = runs.length === 1 ? "all" : first === last ? first : `${first} to ${last}`;
      return made("tr", {}, made("th", { scope: "row" }, name), made("td", {}, percentText(mean / tokens)),
        made("td", {}, number), made("td", { class: "barred" }, bar));
    });
    const head = made("tr", {}, ...["layer", "share", "tokens per head", ""].map((text) => made(text ? "th" : "td", text ? { scope: "col" } : {}, text)));
    const caption = this.kept.isUniform() ? "Every head of every layer keeps the same tokens" : "Kept share of every layer";
    this.layers.append(made("table", {}, made("caption", {}, caption), made("thead", {}, head), made("tbody", {}, ...rows)));
  }

  show(token) {
    this.pane.show(token);
    const { counts, heads } = this.kept.chosen(this.at.place, this.at.head);
    const text = JSON.stringify(this.words.pieces[token]);
    const needed = this.words.needed[token] ? ", in a part that the answer needs" : "";
    this.status.textContent = `token ${numberText(token)} ${text}: kept by ${counts[token]} of ${heads} ${heads === 1 ? "head" : "heads"}${needed}`;
    this.votes.draw(this.at, token);
  }
}
