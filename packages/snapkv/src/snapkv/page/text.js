// The prompt as rows of text; only the rows in view are in the page.

const ROWS_AROUND = 12;
const TAB = "    ";

// The tokens of each row, for a width in characters.
class Rows {
  constructor(words, columns) {
    this.tokens = [];
    this.froms = [];
    this.tos = [];
    this.firsts = [0];
    this.rowOf = new Int32Array(words.pieces.length);
    let used = 0;
    const newRow = () => { this.firsts.push(this.tokens.length); used = 0; };
    for (let token = 0; token < words.pieces.length; token += 1) {
      const piece = words.pieces[token];
      const lead = piece.length - piece.trimStart().length;
      if (used && !piece.includes("\n") && used + piece.length > columns && piece.length - lead <= columns) newRow();
      this.rowOf[token] = this.firsts.length - 1;
      let from = 0;
      while (from < piece.length) {
        const broken = piece.indexOf("\n", from);
        const end = broken < 0 ? piece.length : broken + 1;
        const to = Math.min(end, from + Math.max(1, columns - used));
        this.tokens.push(token);
        this.froms.push(from);
        this.tos.push(to);
        used += to - from;
        from = to;
        if (piece[to - 1] === "\n" || used >= columns) newRow();
      }
    }
    this.count = this.firsts.length;
    this.firsts.push(this.tokens.length);
  }
}

// A piece of the text in one line.
function shown(piece) {
  return piece.replaceAll("\t", TAB).replaceAll("\n", " ");
}

class TextPane {
  // `onToken` is called with the token under the pointer, or under the cursor.
  constructor(words, onToken) {
    this.words = words;
    this.onToken = onToken;
    this.current = 0;
    this.element = made("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Map of the text" });
    this.inner = made("div", {});
    this.element.append(this.inner);
    // `show` has drawn the rows that it scrolls to. Drawing them once more would take the element under the pointer
    // away, and a click whose press and release fall on two elements is lost.
    this.element.addEventListener("scroll", () => {
      if (this.firstToDraw() !== this.firstDrawn) this.draw();
    });
    this.element.addEventListener("keydown", (event) => this.pressed(event));
    this.element.addEventListener("click", (event) => this.pointed(event, (token) => this.show(token)));
    this.element.addEventListener("pointerover", (event) => this.pointed(event, this.onToken));
    this.element.addEventListener("pointerleave", () => this.onToken(this.current));
  }

  pointed(event, act) {
    const token = event.target.dataset?.token;
    if (token !== undefined) act(Number(token));
  }

  // Call this once the pane is in the page, and after its width has changed.
  layOut() {
    const style = getComputedStyle(this.element);
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.font = `${style.fontSize} ${style.fontFamily}`;
    const columns = Math.max(20, Math.floor((this.element.clientWidth - 12) / canvas.measureText("0").width));
    if (columns !== this.columns) {
      this.columns = columns;
      this.rows = new Rows(this.words, columns);
    }
    this.height = parseFloat(style.fontSize) * 1.5;
    this.inner.style.height = `${this.rows.count * this.height}px`;
  }

  // By a function that gives the share of heads that keep a token; drawn by the next `draw`.
  shade(share) {
    this.share = share;
  }

  firstToDraw() {
    return Math.max(0, Math.floor(this.element.scrollTop / this.height) - ROWS_AROUND);
  }

  draw() {
    if (!this.rows || !this.share) return;
    const first = this.firstToDraw();
    const inView = Math.ceil(this.element.clientHeight / this.height) + 2 * ROWS_AROUND;
    const last = Math.min(this.rows.count, first + inView);
    const drawn = document.createDocumentFragment();
    for (let row = first; row < last; row += 1) drawn.append(this.row(row));
    this.inner.replaceChildren(drawn);
    this.firstDrawn = first;
  }

  row(row) {
    const element = made("div", { class: "row" });
    element.style.top = `${row * this.height}px`;
    const { tokens, froms, tos, firsts } = this.rows;
    for (let i = firsts[row]; i < firsts[row + 1]; i += 1) {
      const token = tokens[i];
      const span = document.createElement("span");
      const share = this.share(token);
      const level = share ? Math.max(1, Math.round(10 * share)) : 0;
      span.className = `k${level}${token === this.current ? " current" : ""}`;
      span.dataset.token = token;
      span.textContent = shown(this.words.pieces[token].slice(froms[i], tos[i]));
      element.append(span);
    }
    return element;
  }

  show(token) {
    this.current = token;
    const top = this.rows.rowOf[token] * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top + this.height > scrollTop + clientHeight) {
      this.element.scrollTop = top - clientHeight / 2;
    }
    this.draw();
    this.onToken(token);
  }

  pressed(event) {
    const last = this.words.pieces.length - 1;
    const moves = { ArrowRight: this.current + 1, ArrowLeft: this.current - 1, Home: 0, End: last };
    if (!(event.key in moves) || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(last, moves[event.key])));
  }
}
