// Puts the page together and connects the pickers with the views.

function start() {
  const began = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const words = new Words(data.pieces, data.spans);
  const byId = (id) => document.getElementById(id);
  const { documents = [], question = "" } = data.request;
  byId("title").textContent = `What was kept of ${documents.join(", ") || "the prompt"}`;
  document.title = byId("title").textContent;
  byId("question").textContent = question;
  byId("lead").textContent = data.methods[0].sentence;

  const views = data.methods.map((method) => new MethodView(method, words, (token) => move(token)));
  byId("methods").append(...views.map((view) => view.element));
  byId("answers").append(
    answerCard("full cache", data.full, null),
    ...data.methods.map((method) => answerCard(method.label, method.answer, method)),
  );
  byId("changes-legend").hidden = data.methods.every((method) => method.answer.same);
  const curve = data.curve.length ? new CurveView(data) : null;

  fillPickers(byId("layer"), byId("head"), views);
  const choose = () => {
    for (const view of views) view.choose(Number(byId("layer").value), Number(byId("head").value));
  };
  byId("layer").addEventListener("change", () => { fillHeads(byId("layer"), byId("head"), views); choose(); });
  byId("head").addEventListener("change", choose);
  byId("linear").addEventListener("change", () => { for (const view of views) view.scale(byId("linear").checked); });
  byId("controls").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = words.find(byId("find").value, views[0].pane.current);
    byId("found").textContent = token < 0 ? "not found" : `token ${numberText(token)}`;
    if (token >= 0) move(token);
  });

  function move(token) {
    for (const view of views) view.show(token);
  }

  const layOut = () => { for (const view of views) view.pane.layOut(); choose(); curve?.draw(); };
  layOut();
  const worst = data.spans.reduce((one, other) => (other.loss > one.loss ? other : one), { start: 0, loss: 0 });
  move(worst.start);
  for (const one of views) {
    one.pane.element.addEventListener("scroll", () => {
      for (const other of views) {
        if (other !== one && other.pane.element.scrollTop !== one.pane.element.scrollTop) {
          other.pane.element.scrollTop = one.pane.element.scrollTop;
        }
      }
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layOut);
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(layOut, 150);
  });

  showSpans(byId("spans"), byId("spans-note"), data, views, words, move);
  byId("facts").append(tableOf("What the page depends on", ["setting", "value"], facts(data)));
  document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
}

function fillPickers(layer, head, views) {
  layer.append(new Option("all layers", "-1"));
  for (const one of views[0].method.layers) layer.append(new Option(`layer ${one.layer}`, String(one.layer)));
  fillHeads(layer, head, views);
}

function fillHeads(layer, head, views) {
  const before = head.value;
  const number = Number(layer.value);
  const counts = number < 0 ? [0] : views.map((view) => view.kept.heads(view.place(number)));
  const most = Math.max(...counts);
  head.replaceChildren(new Option("all heads", "-1"), ...Array.from({ length: most }, (_, h) => new Option(`head ${h}`, String(h))));
  head.disabled = number < 0;
  head.value = Number(before) < most && number >= 0 && before !== "" ? before : "-1";
}

function showSpans(target, note, data, views, words, move) {
  if (!data.spans.length) {
    note.textContent = "Not measured: --checks was 0, or the answer has a single token, which no cache can change.";
    return;
  }
  note.textContent = `The whole prompt was read. Then each part was masked in all heads and layers while the model read the full cache's answer, ${JSON.stringify(data.checked_answer)}. "Loss" is how much less likely the answer became, in nats per token. The answer needs a part if masking it changes a token.`;
  const worst = [...data.spans].sort((one, other) => other.loss - one.loss).slice(0, 12);
  const rows = worst.map((span) => {
    const button = made("button", { type: "button" }, span.place);
    button.addEventListener("click", () => { move(span.start); document.getElementById("document").scrollIntoView(); });
    const kept = views.map((view) => {
      const { counts, heads } = view.kept.chosen(-1, -1);
      let sum = 0;
      for (let token = span.start; token < span.stop; token += 1) sum += counts[token];
      return percentText(sum / heads / (span.stop - span.start));
    });
    const text = words.text.slice(words.starts[span.start], words.starts[span.stop]).replace(/\s+/g, " ").trim();
    return [button, `${numberText(span.start)} to ${numberText(span.stop - 1)}`, span.loss.toFixed(3), span.changed ? "yes" : "no", ...kept, text.length > 160 ? `${text.slice(0, 160)}…` : text];
  });
  const headings = ["part", "tokens", "loss", "changes the answer", ...views.map((view) => `kept by ${view.method.label}`), "text"];
  target.append(tableOf(`The ${worst.length} parts with the largest loss, of ${data.spans.length}`, headings, rows));
}

function facts(data) {
  const rows = Object.entries(data.request).filter(([, value]) => value !== null);
  for (const method of data.methods) rows.push([`method ${method.label}`, method.policy]);
  rows.push(["layers that are never compressed", data.other_layers]);
  rows.push(["share of the other layers in the full cache", percentText(data.growing_share)]);
  return rows.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
}

start();
