// Quality against memory: one method at several budgets, with a slider.

// A point is filled if the answer is the full cache's, and hollow otherwise.
function drawCurve(canvas, points, full, chosen) {
  const { pen, width, height } = prepared(canvas);
  const edge = { left: 44, right: 14, top: 12, bottom: 34 };
  const logs = points.map((point) => Math.log2(point.held_bytes));
  const low = Math.min(...logs);
  const spread = Math.max(...logs) - low || 1;
  const x = (i) => edge.left + ((logs[i] - low) / spread) * (width - edge.left - edge.right);
  const y = (share) => height - edge.bottom - share * (height - edge.top - edge.bottom);
  pen.strokeStyle = colour("--line");
  pen.fillStyle = colour("--quiet");
  for (const share of [0, 0.5, 1]) {
    pen.beginPath();
    pen.moveTo(edge.left, y(share));
    pen.lineTo(width - edge.right, y(share));
    pen.stroke();
    pen.fillText(percentText(share), 4, y(share) + 4);
  }
  if (full !== null) {
    pen.strokeStyle = colour("--cut");
    pen.setLineDash([6, 3]);
    pen.beginPath();
    pen.moveTo(edge.left, y(full));
    pen.lineTo(width - edge.right, y(full));
    pen.stroke();
    pen.setLineDash([]);
  }
  const shown = points.map((point, i) => ({ at: i, point })).filter(({ point }) => point.likelihood !== null);
  pen.strokeStyle = colour("--score");
  pen.lineWidth = 2;
  pen.beginPath();
  shown.forEach(({ at, point }, i) => { if (i) pen.lineTo(x(at), y(point.likelihood)); else pen.moveTo(x(at), y(point.likelihood)); });
  pen.stroke();
  for (const { at, point } of shown) {
    pen.beginPath();
    pen.arc(x(at), y(point.likelihood), at === chosen ? 8 : 5, 0, 2 * Math.PI);
    pen.fillStyle = colour(point.same ? "--score" : "--card");
    pen.fill();
    pen.strokeStyle = colour(at === chosen ? "--focus" : "--score");
    pen.stroke();
  }
  pen.fillStyle = colour("--quiet");
  pen.textAlign = "center";
  let free = -Infinity;
  points.forEach((point, i) => {
    const text = bytesText(point.held_bytes);
    const half = pen.measureText(text).width / 2;
    const at = Math.max(half, Math.min(width - half, x(i)));
    if (at - half > free) { pen.fillText(text, at, height - 10); free = at + half + 6; }
  });
}

class CurveView {
  constructor(data) {
    const byId = (id) => document.getElementById(id);
    this.points = data.curve;
    this.full = data.full_likelihood;
    this.canvas = byId("memory-curve");
    this.slider = byId("memory-slider");
    this.answer = byId("memory-answer");
    byId("memory").hidden = false;
    byId("memory-note").textContent = `The same question to ${data.methods[0].label} at ${this.points.length} budgets. Height: the probability of a token of the full cache's answer under that cache, as a geometric mean; the dashed line is that of the full cache itself. Filled points give the same answer, hollow points another one.`;
    const rows = this.points.map((point) => [numberText(point.budget), bytesText(point.held_bytes), percentText(point.held_bytes / point.full_bytes), this.likely(point), point.same ? "same" : "other"]);
    byId("memory-table").append(tableOf("Every budget", ["budget", "held", "of the full cache", "probability of the full cache's answer", "answer"], rows));
    this.slider.max = String(this.points.length - 1);
    const same = this.points.findIndex((point) => point.same);
    this.slider.value = String(same < 0 ? this.points.length - 1 : same);
    this.slider.addEventListener("input", () => this.draw());
    const first = same < 0 ? "no budget gives the full cache's answer" : `${numberText(this.points[same].budget)} tokens are the smallest budget that gives the full cache's answer`;
    this.canvas.setAttribute("aria-label", `Probability of the full cache's answer against memory; ${first}`);
  }

  likely(point) {
    return point.likelihood === null ? "not known" : percentText(point.likelihood);
  }

  draw() {
    const chosen = Number(this.slider.value);
    const point = this.points[chosen];
    drawCurve(this.canvas, this.points, this.full, chosen);
    const text = `${numberText(point.budget)} tokens per head: ${heldText(point)}; probability of the full cache's answer ${this.likely(point)}`;
    this.slider.setAttribute("aria-valuetext", `${text}; ${point.same ? "the same answer" : "another answer"}`);
    this.answer.replaceChildren(made("header", {}, made("span", {}, text), verdict(point)), changed(point));
  }
}
