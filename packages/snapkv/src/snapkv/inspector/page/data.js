// The record as typed arrays, decoded when first used.

function decoded(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// Powers of ten in the range of a byte, the same as `DECADES` of packing.py.
const DECADES = {{decades}};

// One method: which heads keep a token, and how they rated it.
class Kept {
  constructor(method, tokens) {
    this.method = method;
    this.tokens = tokens;
    this.stride = Math.ceil(tokens / 8);
    this.cache = new Map();
  }

  remembered(name, make) {
    if (!this.cache.has(name)) this.cache.set(name, make());
    return this.cache.get(name);
  }

  bits(place) {
    return this.remembered(`bits ${place}`, () => decoded(this.method.layers[place].bits));
  }

  heads(place) {
    return this.method.layers[place].kept_tokens.length;
  }

  // Whether every head of every layer keeps the same tokens.
  isUniform() {
    const [first, ...others] = this.method.layers;
    if (others.some((layer) => layer.bits !== first.bits)) return false;
    const bits = this.bits(0);
    return bits.every((byte, i) => byte === bits[i % this.stride]);
  }

  // A byte per bin of tokens for one head, or null where the method has no such numbers.
  levels(kind, place, head) {
    const text = this.method.layers[place][kind];
    if (!text) return null;
    const all = this.remembered(`${kind} ${place}`, () => decoded(text));
    const bins = all.length / this.heads(place);
    return all.subarray(head * bins, (head + 1) * bins);
  }

  // How many of the chosen heads keep each token. A place of -1 means all layers, a head of -1 all heads.
  chosen(place, head) {
    return this.remembered(`chosen ${place} ${head}`, () => {
      const counts = new Uint16Array(this.stride * 8);
      const places = place < 0 ? [...this.method.layers.keys()] : [place];
      let heads = 0;
      for (const one of places) {
        const bits = this.bits(one);
        const first = head < 0 ? 0 : head;
        const last = head < 0 ? this.heads(one) : head + 1;
        heads += last - first;
        for (let h = first; h < last; h += 1) this.add(counts, bits, h * this.stride);
      }
      return { counts: counts.subarray(0, this.tokens), heads };
    });
  }

  add(counts, bits, offset) {
    for (let i = 0; i < this.stride; i += 1) {
      let byte = bits[offset + i];
      for (let token = i * 8; byte; token += 1, byte >>= 1) counts[token] += byte & 1;
    }
  }
}

// The text of all tokens, where each begins, and which of them the answer needs.
class Words {
  constructor(pieces, spans) {
    this.pieces = pieces;
    this.text = pieces.join("");
    this.starts = new Int32Array(pieces.length + 1);
    for (let i = 0; i < pieces.length; i += 1) this.starts[i + 1] = this.starts[i] + pieces[i].length;
    this.needed = new Uint8Array(pieces.length);
    for (const span of spans) if (span.changed) this.needed.fill(1, span.start, span.stop);
  }

  tokenAt(character) {
    let low = 0;
    let high = this.pieces.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= character) low = middle; else high = middle - 1;
    }
    return low;
  }

  // The next token after a given one where a text is found, wrapping around at the end; or -1.
  find(wanted, behind) {
    if (!wanted) return -1;
    const pattern = new RegExp(wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
    pattern.lastIndex = this.starts[behind + 1];
    const found = pattern.exec(this.text) ?? pattern.exec(this.text);
    return found ? this.tokenAt(found.index) : -1;
  }
}

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

function numberText(count) {
  return Math.round(count).toLocaleString("en");
}

function percentText(share) {
  return `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;
}

// Elements get text only: nothing in the document is ever parsed as markup.
function made(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function tableOf(caption, headings, rows) {
  const head = made("tr", {}, ...headings.map((text) => made("th", { scope: "col" }, text)));
  const body = rows.map((cells) => made("tr", {}, ...cells.map((cell, i) => {
    if (i === 0) return made("th", { scope: "row" }, cell);
    return made("td", typeof cell === "string" && !/^-?\d[\d,.]*( to [\d,]+|%| .?i?B)?$/.test(cell) ? { class: "left" } : {}, cell);
  })));
  return made("table", {}, made("caption", {}, caption), made("thead", {}, head), made("tbody", {}, ...body));
}
