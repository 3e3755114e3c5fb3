// Charts on canvases; their labels say in words what they show.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A canvas as sharp as the screen: its context, its width and its height in CSS pixels.
function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 300;
  const height = canvas.clientHeight || 100;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

// Highest level of each of some columns, over the tokens of [from, to).
function columnsOf(levels, binTokens, from, to, count) {
  const columns = new Float32Array(count);
  if (!levels) return columns;
  for (let column = 0; column < count; column += 1) {
    const first = from + ((to - from) * column) / count;
    const next = from + ((to - from) * (column + 1)) / count;
    const last = Math.max(Math.floor(first / binTokens) + 1, Math.ceil(next / binTokens));
    for (let bin = Math.floor(first / binTokens); bin < Math.min(last, levels.length); bin += 1) {
      if (levels[bin] > columns[column]) columns[column] = levels[bin];
    }
  }
  return columns;
}

// Which of some columns hold a kept token of [from, to).
function keptColumns({ bits, offset, from, to }, count) {
  const columns = new Uint8Array(count);
  const perToken = count / (to - from);
  for (let token = from; token < to; token += 1) {
    const byte = bits[offset + (token >> 3)];
    if (!byte && !(token & 7)) token += 7;
    else if ((byte >> (token & 7)) & 1) columns[Math.min(count - 1, Math.floor((token - from) * perToken))] = 1;
  }
  return columns;
}

// The votes, the pooled votes, the cut, and the kept tokens: Fig. 1 of the paper.
function drawVotes(canvas, view) {
  const { pen, width, height } = prepared(canvas);
  const strip = 10;
  const ground = height - strip - 4;
  const count = Math.max(1, Math.min(Math.floor(width), view.to - view.from));
  const step = width / count;
  const at = (level) => ground - view.share(level) * (ground - 4);
  const scores = columnsOf(view.scores, view.binTokens, view.from, view.to, count);
  const votes = columnsOf(view.votes, view.binTokens, view.from, view.to, count);
  const bar = Math.max(1, step - (step > 4 ? 1 : 0));
  for (const [columns, name] of [[scores, view.votes ? "--vote" : "--score"], [votes, "--score"]]) {
    pen.fillStyle = colour(name);
    for (let i = 0; i < count; i += 1) if (columns[i]) pen.fillRect(i * step, at(columns[i]), bar, ground - at(columns[i]));
  }
  if (view.cut !== null && view.cut !== undefined) {
    pen.strokeStyle = colour("--cut");
    pen.setLineDash([6, 3]);
    pen.beginPath();
    pen.moveTo(0, at(view.cut));
    pen.lineTo(width, at(view.cut));
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.fillStyle = colour("--text");
  keptColumns(view, count).forEach((kept, i) => { if (kept) pen.fillRect(i * step, height - strip, bar, strip); });
  const perToken = width / (view.to - view.from);
  pen.strokeStyle = colour("--focus");
  pen.strokeRect((view.mark.from - view.from) * perToken, 1, Math.max(2, (view.mark.to - view.mark.from) * perToken), height - 2);
}

// Stronger cells have more attention; rows go from the first query of the window to the last.
function drawHeat(canvas, { weights, rows, binTokens, from, to, share }) {
  const { pen, width, height } = prepared(canvas);
  const bins = weights.length / rows;
  const count = Math.min(Math.floor(width), to - from);
  pen.fillStyle = colour("--score");
  for (let row = 0; row < rows; row += 1) {
    const columns = columnsOf(weights.subarray(row * bins, (row + 1) * bins), binTokens, from, to, count);
    const top = Math.round((row * height) / rows);
    const tall = Math.max(1, Math.round(((row + 1) * height) / rows) - top - (height > 4 * rows ? 1 : 0));
    columns.forEach((level, i) => {
      pen.globalAlpha = share(level);
      if (level) pen.fillRect((i * width) / count, top, width / count, tall);
    });
  }
  pen.globalAlpha = 1;
}

// Bars; values are shares.
function drawBars(canvas, values) {
  const { pen, width, height } = prepared(canvas);
  const step = width / values.length;
  const top = Math.max(...values, 1e-9);
  pen.fillStyle = colour("--score");
  values.forEach((value, i) => {
    const tall = ((height - 16) * value) / top;
    pen.fillRect(i * step, height - tall, Math.max(1, step - 1), tall);
  });
  pen.fillStyle = colour("--quiet");
  pen.fillText(percentText(top), 2, 11);
}
