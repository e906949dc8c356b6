(() => {
  const all = [...document.querySelectorAll("[data-arm]")];
  const chosen = new Set();
  let hovered = null;
  const show = () => {
    const active = new Set(hovered === null ? chosen : [...chosen, hovered]);
    document.body.classList.toggle("choosing", active.size > 0);
    for (const one of all) {
      one.classList.toggle("on", active.has(one.dataset.arm));
      if (one.matches("button")) one.setAttribute("aria-pressed", chosen.has(one.dataset.arm));
    }
  };
  const hover = (arm) => { hovered = arm; show(); };
  const choose = (arm) => { chosen.delete(arm) || chosen.add(arm); show(); };
  for (const one of all) {
    one.addEventListener("pointerenter", () => hover(one.dataset.arm));
    one.addEventListener("pointerleave", () => hover(null));
    one.addEventListener("focus", () => hover(one.dataset.arm));
    one.addEventListener("blur", () => hover(null));
    one.addEventListener("click", () => choose(one.dataset.arm));
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") { chosen.clear(); hover(null); }
  });

  const text = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const value = (at, scale, log) => {
    const [low, high, start, end] = scale.split(" ").map(Number);
    const share = (at - start) / (end - start);
    return log ? low * (high / low) ** share : low + (high - low) * share;
  };
  for (const svg of document.querySelectorAll("svg[data-x]")) {
    const output = svg.parentElement.querySelector("output");
    const dot = svg.querySelector(".dot");
    const points = [...svg.querySelectorAll("g.arm")].flatMap((arm) =>
      [...arm.querySelectorAll("polyline.line")].flatMap((line) =>
        [...line.points].map(({ x, y }) => ({ arm, x, y }))));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      const far = (point) => Math.hypot(point.x - x, point.y - y);
      const shown = points.filter(({ arm }) => !chosen.size || arm.matches(".on"));
      if (!shown.length) return;
      const near = shown.reduce((best, point) => (far(point) < far(best) ? point : best));
      if (far(near) > 60) return;
      const { log } = svg.dataset;
      dot.setAttribute("cx", near.x);
      dot.setAttribute("cy", near.y);
      dot.style.visibility = "visible";
      output.textContent = `${near.arm.dataset.name}: ` +
        `${text(value(near.y, svg.dataset.y, log !== undefined))} at ${text(value(near.x, svg.dataset.x))}`;
      hover(near.arm.dataset.arm);
    });
    svg.addEventListener("pointerleave", () => {
      output.textContent = "";
      dot.style.visibility = "hidden";
      hover(null);
    });
  }
})();
