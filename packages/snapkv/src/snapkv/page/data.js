// The record as typed arrays.

function decoded(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// Who voted for a token: the voters with the most votes, and their parts of all of its votes.
class Ballot {
  constructor({ who, parts, ...rest }) {
    Object.assign(this, rest, { who: new Int32Array(decoded(who).buffer), parts: decoded(parts) });
  }

  of(token) {
    if (token >= this.tokens) return [];
    const place = Math.floor(token / this.bin_tokens) * this.named;
    const found = [];
    for (let i = place; i < place + this.named; i += 1) {
      if (this.parts[i]) found.push({ token: this.who[i], part: this.parts[i] / 255 });
    }
    return found;
  }
}

// The text of all tokens, and where each begins.
class Words {
  constructor(pieces) {
    this.pieces = pieces;
    this.text = pieces.join("");
    this.starts = new Int32Array(pieces.length + 1);
    for (let i = 0; i < pieces.length; i += 1) this.starts[i + 1] = this.starts[i] + pieces[i].length;
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

function numberText(count) {
  return Math.round(count).toLocaleString("en");
}

function percentText(share) {
  return `${Math.round(100 * share)}%`;
}

// Elements get text only: nothing in the document is ever parsed as markup.
function made(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}
