(() => {
  const arms = document.querySelector(".arms");
  const all = [...arms.querySelectorAll("[data-series]")];
  const chosen = new Set();
  let hovered = null;
  const show = () => {
    const active = new Set(hovered === null ? chosen : [...chosen, hovered]);
    arms.classList.toggle("choosing", active.size > 0);
    for (const one of all) {
      one.classList.toggle("on", active.has(one.dataset.series));
      if (one.matches("button")) one.setAttribute("aria-pressed", chosen.has(one.dataset.series));
    }
  };
  const hover = (series) => { hovered = series; show(); };
  const choose = (series) => { chosen.delete(series) || chosen.add(series); show(); };
  for (const one of all) {
    one.addEventListener("pointerenter", () => hover(one.dataset.series));
    one.addEventListener("pointerleave", () => hover(null));
    one.addEventListener("focus", () => hover(one.dataset.series));
    one.addEventListener("blur", () => hover(null));
    one.addEventListener("click", () => choose(one.dataset.series));
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") { chosen.clear(); hover(null); }
  });

  const text = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const value = (at, scale, isLog) => {
    const [low, high, start, end] = scale.split(" ").map(Number);
    const share = (at - start) / (end - start);
    return isLog ? low * (high / low) ** share : low + (high - low) * share;
  };
  for (const svg of arms.querySelectorAll("svg[data-x]")) {
    const output = svg.parentElement.querySelector("output");
    const dot = svg.querySelector(".dot");
    const points = [...svg.querySelectorAll("g.series")].flatMap((series) =>
      [...series.querySelectorAll("polyline.line")].flatMap((line) =>
        [...line.points].map(({ x, y }) => ({ series, x, y }))));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      const far = (point) => Math.hypot(point.x - x, point.y - y);
      const shown = points.filter(({ series }) => !chosen.size || series.matches(".on"));
      if (!shown.length) return;
      const near = shown.reduce((best, point) => (far(point) < far(best) ? point : best));
      if (far(near) > 60) return;
      const { log } = svg.dataset;
      dot.setAttribute("cx", near.x);
      dot.setAttribute("cy", near.y);
      dot.style.visibility = "visible";
      output.textContent = `${near.series.dataset.name}: ` +
        `${text(value(near.y, svg.dataset.y, log.includes("y")))} at ` +
        text(value(near.x, svg.dataset.x, log.includes("x")));
      hover(near.series.dataset.series);
    });
    svg.addEventListener("pointerleave", () => {
      output.textContent = "";
      dot.style.visibility = "hidden";
      hover(null);
    });
  }
})();
