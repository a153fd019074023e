(() => {
  "use strict";
  document.documentElement.classList.add("scripted");
  const short = (v) => {
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size < 1e-4 || size >= 1e9) return v.toExponential(2);
    return size >= 99.95 ? Math.round(v).toLocaleString("en") : v.toPrecision(4);
  };
  const seconds = (v) => {
    if (v < 0.9995e-3) return short(v * 1e6) + " us";
    if (v < 0.9995) return short(v * 1e3) + " ms";
    return v < 59.95 ? short(v) + " s" : short(v / 60) + " min";
  };
  const say = { number: short, seconds, percent: (v) => (100 * v).toFixed(2) + "%" };
  const whole = (v) => v.toLocaleString("en");
  const middle = (s, i) => (s.last ? (s.first[i] + s.last[i]) / 2 : s.first[i]);

  // The index of the point of `s` that lies nearest to `x`; its points ascend.
  const nearest = (s, x) => {
    let low = 0, high = s.first.length - 1;
    while (low < high) {
      const at = (low + high) >> 1;
      if (middle(s, at) < x) low = at + 1; else high = at;
    }
    return low > 0 && x - middle(s, low - 1) < middle(s, low) - x ? low - 1 : low;
  };

  const row = (s, i, kind) => {
    const line = document.createElement("div");
    const key = document.createElement("span");
    key.className = "key b" + (s.color % 6);
    line.append(key, s.name + " ");
    const value = document.createElement("b");
    value.textContent = s.mean[i] === null ? "not finite" : say[kind](s.mean[i]);
    line.append(value);
    if (s.low && s.mean[i] !== null && s.low[i] < s.high[i]) {
      line.append(" (" + say[kind](s.low[i]) + " to " + say[kind](s.high[i]) + ")");
    }
    return line;
  };

  for (const figure of document.querySelectorAll(".chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
    const main = data.series.reduce((a, b) => (b.first.length > a.first.length ? b : a));
    let at = -1;

    const show = (x) => {
      at = nearest(main, x);
      const place = (middle(main, at) - data.low) / (data.high - data.low);
      const head = document.createElement("div");
      const first = main.first[at], last = main.last ? main.last[at] : first;
      head.textContent = first === last ? "step " + whole(first) : "steps " + whole(first) + " to " + whole(last);
      // Evaluations are shown where the pointer is near one, the other curves everywhere.
      const near = (data.high - data.low) * 0.03;
      const rows = data.series.flatMap((s) => {
        const i = nearest(s, middle(main, at));
        const far = Math.abs(middle(s, i) - middle(main, at)) > Math.max(near, (last - first) * 2);
        return far ? [] : [row(s, i, data.kind)];
      });
      tip.replaceChildren(head, ...rows);
      cursor.hidden = tip.hidden = false;
      cursor.style.left = 100 * place + "%";
      const room = plot.clientWidth - tip.offsetWidth;
      const wanted = place * plot.clientWidth + (place < 0.5 ? 12 : -12 - tip.offsetWidth);
      tip.style.left = Math.min(Math.max(wanted, Math.min(0, room)), Math.max(0, room)) + "px";
    };
    const hide = () => { cursor.hidden = tip.hidden = true; };

    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      show(data.low + ((event.clientX - box.left) / box.width) * (data.high - data.low));
    });
    plot.addEventListener("pointerdown", (event) => plot.dispatchEvent(new PointerEvent("pointermove", event)));
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!by) return;
      event.preventDefault();
      show(middle(main, Math.min(Math.max(at + by, 0), main.first.length - 1)));
    });
    const scale = figure.querySelector(".scale");
    if (scale) scale.addEventListener("click", () => {
      scale.setAttribute("aria-pressed", figure.classList.toggle("is-log"));
    });
  }

  for (const button of document.querySelectorAll("button[data-copy]")) {
    if (!navigator.clipboard) { button.hidden = true; continue; }
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
})();
