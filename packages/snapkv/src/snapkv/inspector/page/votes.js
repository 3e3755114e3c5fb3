// The vote of one head: attention, pooled votes, the cut, and a slider that moves it.

const DETAIL_TOKENS = 160;

// What a head would keep at other budgets: its positions by descending score.
class Order {
  constructor(heat, words) {
    this.positions = new Int32Array(decoded(heat.order).buffer);
    this.best = heat.best_tokens;
    this.prefix = heat.prefix_tokens;
    this.words = words;
    this.neededRanks = [];
    this.positions.forEach((token, rank) => { if (words.needed[token]) this.neededRanks.push(rank); });
    this.needed = words.needed.subarray(0, this.prefix).reduce((sum, one) => sum + one, 0);
  }

  // A bit set of the top `count` tokens and the window.
  bits(count) {
    const tokens = this.words.pieces.length;
    const bits = new Uint8Array(Math.ceil(tokens / 8));
    const keep = (token) => { bits[token >> 3] |= 1 << (token & 7); };
    this.positions.subarray(0, count).forEach(keep);
    for (let token = this.prefix; token < tokens; token += 1) keep(token);
    return bits;
  }

  text(count) {
    const best = `Top ${numberText(count)} tokens${count === this.best ? " (the kept ones)" : ""}`;
    if (!this.needed) return best;
    const kept = this.neededRanks.filter((rank) => rank < count).length;
    const all = this.neededRanks.length === this.needed ? `; all of it from top ${numberText(this.neededRanks[this.needed - 1] + 1)} on` : "";
    return `${best}: ${percentText(kept / this.needed)} of what the answer needs${all}`;
  }
}

class VotesView {
  constructor(method, kept, words, onMove) {
    Object.assign(this, { method, kept, words, onMove, linear: false });
    this.heat = method.heat;
    this.order = this.heat?.order ? new Order(this.heat, words) : null;
    this.weights = this.heat?.weights ? decoded(this.heat.weights) : null;
    this.title = made("h4", {});
    this.note = made("p", { class: "quiet" });
    this.overview = made("canvas", { role: "img", class: "overview" });
    this.map = made("canvas", { role: "img", class: "heat" });
    this.detail = made("canvas", { role: "img", class: "detail" });
    this.mapFigure = figure(this.map, "Attention of the observation window: one row per query, the last at the bottom; stronger means more attention. Columns are the tokens of the next chart.");
    this.overview.addEventListener("click", (event) => {
      onMove(Math.min(words.pieces.length - 1, Math.floor((event.offsetX / this.overview.clientWidth) * words.pieces.length)));
    });
    this.figures = made("div", {},
      figure(this.overview, "The whole prompt from left to right: votes (strong), pooled votes (pale), the lowest pooled vote that is kept (dashed), kept tokens (below)."),
      this.mapFigure, figure(this.detail, `${DETAIL_TOKENS} tokens around the current one.`), this.sliding());
    this.element = made("div", { class: "votes" }, this.title, this.note, this.figures);
  }

  sliding() {
    this.slider = made("input", { type: "range", class: "top-k", min: "0", step: "1", "aria-label": `Top-k: tokens that this head keeps, ${this.method.label}` });
    this.result = made("output", { class: "quiet", "aria-live": "polite" });
    this.slider.max = String(this.order?.positions.length ?? 0);
    this.slider.value = String(this.order?.best ?? 0);
    this.slider.addEventListener("input", () => this.draw(this.at, this.current));
    this.slide = made("div", {}, made("span", { class: "slide", "aria-hidden": "true" }, "Top-k: what this head would keep"), this.slider, this.result);
    return this.slide;
  }

  // The head to show: the picked one, else the one that votes most for what the answer needs.
  shown(at) {
    const { layers } = this.method;
    const telling = this.heat ? layers.findIndex((one) => one.layer === this.heat.layer) : -1;
    const place = at.place >= 0 ? at.place : Math.max(0, telling);
    const head = at.head >= 0 ? at.head : place === telling ? this.heat.head : 0;
    return { place, head, isTelling: place === telling && head === this.heat.head };
  }

  draw(at, current) {
    Object.assign(this, { at, current });
    const { place, head, isTelling } = this.shown(at);
    const layer = this.method.layers[place];
    const scores = this.kept.levels("scores", place, head);
    this.figures.hidden = !scores;
    if (!scores) {
      this.title.textContent = "This method shows no scores";
      this.note.textContent = "It keeps tokens by position, or does not report its scores.";
      return;
    }
    this.title.textContent = `Votes of layer ${layer.layer}, head ${head}`;
    this.note.textContent = isTelling
      ? `The head that votes most for what the answer needs: ${percentText(this.heat.share)} of its votes.`
      : this.heat ? `Layer ${this.heat.layer}, head ${this.heat.head} votes most for what the answer needs.` : "";
    const view = {
      scores,
      votes: this.kept.levels("votes", place, head),
      binTokens: this.method.bin_tokens,
      share: this.shares(layer),
      ...this.keeping(layer, place, head, isTelling),
    };
    this.drawAround(view, `Layer ${layer.layer}, head ${head}`, isTelling);
  }

  // From a level to a share of the height: unchanged, or from logarithmic to linear.
  shares(layer) {
    const undone = this.linear && layer.logarithmic;
    return (level) => (undone ? (level ? 10 ** (DECADES * (level / 255 - 1)) : 0) : level / 255);
  }

  // The kept tokens, or those of the slider's top-k.
  keeping(layer, place, head, isTelling) {
    const count = Number(this.slider.value);
    this.slide.hidden = !isTelling || !this.order;
    if (this.slide.hidden || count === this.order.best) {
      if (!this.slide.hidden) this.say(count);
      return { bits: this.kept.bits(place), offset: head * this.kept.stride, cut: layer.cuts[head], kept: layer.kept_tokens[head] };
    }
    this.say(count);
    const levels = this.kept.levels("scores", place, head);
    const last = count ? levels[Math.floor(this.order.positions[count - 1] / this.method.bin_tokens)] : null;
    return { bits: this.order.bits(count), offset: 0, cut: last, kept: count + this.words.pieces.length - this.order.prefix };
  }

  say(count) {
    this.result.textContent = `${this.order.text(count)}. The window is kept, too.`;
    this.slider.setAttribute("aria-valuetext", this.result.textContent);
  }

  drawAround(view, label, isTelling) {
    const tokens = this.words.pieces.length;
    const first = Math.max(0, Math.min(this.current - DETAIL_TOKENS / 2, tokens - DETAIL_TOKENS));
    const around = { from: first, to: Math.min(tokens, first + DETAIL_TOKENS) };
    const keeps = `${label} keeps ${numberText(view.kept)} of ${numberText(tokens)} tokens`;
    const range = `tokens ${numberText(around.from)} to ${numberText(around.to - 1)}`;
    this.overview.setAttribute("aria-label", `${keeps}, over the whole prompt`);
    this.detail.setAttribute("aria-label", `${keeps}; ${range}`);
    drawVotes(this.overview, { ...view, from: 0, to: tokens, mark: around });
    drawVotes(this.detail, { ...view, ...around, mark: { from: this.current, to: this.current + 1 } });
    this.mapFigure.hidden = !isTelling || !this.weights;
    if (this.mapFigure.hidden) return;
    const { rows, bin_tokens: binTokens } = this.heat;
    this.map.setAttribute("aria-label", `Attention of the ${rows} tokens of the window to ${range}, ${label}`);
    drawHeat(this.map, { weights: this.weights, rows, binTokens, share: this.shares({ logarithmic: true }), ...around });
  }
}
