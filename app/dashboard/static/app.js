// Charts, the beat of live parts, and the upload. Pages can be read without it.
"use strict";
(() => {
  const TICK_MS = 2000;
  const drawn = new WeakMap();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(3);
  };

  const marksOf = (marks, ink) => ({
    hooks: {
      draw: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = ink;
        ctx.globalAlpha = 0.8;
        ctx.textAlign = "left";
        ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        for (const mark of marks) {
          const x = Math.round(plot.valToPos(mark.x, "x", true));
          ctx.setLineDash([3, 3]);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.fillText(mark.label, x + 4, bbox.top + 11 * devicePixelRatio);
        }
        ctx.restore();
      },
    },
  });

  // By distance of the ticks in seconds: what each shows, and what is added where year or day begin.
  const clock = [
    [86400 * 365, "{YYYY}", null, null, null, null, null, null, 1],
    [86400 * 28, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [86400, "{D} {MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [60, "{HH}:{mm}", "\n{D} {MMM} {YYYY}", null, "\n{D} {MMM}", null, null, null, 1],
  ];
  const draw = (box) => {
    const data = JSON.parse(box.dataset.chart);
    const inks = [colour("--accent"), colour("--second"), colour("--quiet"), colour("--good"), colour("--warn"), colour("--bad")];
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const right = data.series.some((each) => each.axis === "right");
    const series = data.series.map((each, n) => ({
      label: each.label,
      scale: each.axis === "right" ? "right" : "y",
      stroke: inks[n % inks.length],
      width: 2,
      points: { show: data.x.length < 3 || each.dots === true, size: 5 },
      spanGaps: true,
      value: (_, value) => short(value),
      ...(data.band && data.band.includes(n) ? { stroke: inks[1], width: 1 } : {}),
      ...(each.hidden ? { scale: "hidden", stroke: "transparent", points: { show: false } } : {}),
      ...(each.bars ? { paths: uPlot.paths.bars({ size: [0.7, 40], radius: 0.15 }), fill: inks[n % inks.length] + "66", width: 0 } : {}),
    }));
    const options = {
      width: box.clientWidth,
      height: box.clientHeight - 32,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      cursor: { points: { size: 7 } },
      scales: { x: { time: data.time === true }, ...(data.zero ? { y: { range: (_, low, high) => uPlot.rangeNum(Math.min(low, 0), Math.max(high, 0), 0.1, true) } } : {}) },
      ...(data.band ? { bands: [{ series: [data.band[1] + 1, data.band[0] + 1], fill: inks[1] + "33" }] } : {}),
      series: [{ label: data.time ? "UTC" : data.xlabel, ...(data.time ? { value: "{D} {MMM} {YYYY} {HH}:{mm}" } : {}) }, ...series],
      axes: [
        { ...axis, grid: { show: false }, ...(data.time ? { values: clock } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200] }) },
        { ...axis, size: 54, values: (_, ticks) => ticks.map(short) },
        ...(right ? [{ ...axis, scale: "right", side: 1, size: 54, grid: { show: false }, values: (_, ticks) => ticks.map(short) }] : []),
      ],
      plugins: data.marks && data.marks.length ? [marksOf(data.marks, colour("--quiet"))] : [],
    };
    const plot = new uPlot(options, [data.x, ...data.series.map((each) => each.values)], box);
    const follow = new ResizeObserver(() => {
      if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height });
    });
    follow.observe(box);
    drawn.set(box, () => { follow.disconnect(); plot.destroy(); drawn.delete(box); });
  };

  const drawAll = () => {
    if (typeof uPlot === "undefined") return;
    for (const box of document.querySelectorAll("[data-chart]")) if (!drawn.has(box)) draw(box);
  };
  new MutationObserver((changes) => {
    if (changes.some((change) => [...change.addedNodes].some((node) => node.querySelector && (node.matches("[data-chart]") || node.querySelector("[data-chart]"))))) drawAll();
  }).observe(document.body, { childList: true, subtree: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const box of document.querySelectorAll("[data-chart]")) drawn.get(box)?.();
    drawAll();
  });

  // Live parts ask for news only while the page can be seen.
  setInterval(() => {
    if (document.visibilityState === "visible" && document.querySelector("[data-live]")) document.body.dispatchEvent(new Event("tick"));
  }, TICK_MS);

  // A file goes as it is, so that the server can read it in pieces.
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.matches("[data-upload]")) return;
    event.preventDefault();
    const file = form.querySelector("input[type=file]").files[0];
    const result = document.getElementById(form.dataset.upload);
    if (!file) return;
    const button = form.querySelector("button");
    button.disabled = true;
    result.textContent = "Reading …";
    try {
      const answer = await fetch(form.action, { method: "POST", body: file, headers: { "Content-Type": "text/csv", "HX-Request": "true", "HX-Current-URL": location.href, "X-File-Name": encodeURIComponent(file.name) } });
      if (answer.headers.get("HX-Redirect")) { location.href = answer.headers.get("HX-Redirect"); return; }
      result.innerHTML = await answer.text();
    } catch {
      result.textContent = "The connection broke off. What was read before is stored; the same rows are duplicates the next time if they have an event_id.";
    } finally {
      button.disabled = false;
    }
  });

  drawAll();
})();
