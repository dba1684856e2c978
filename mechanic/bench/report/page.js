// A plot is drawn when it comes into view. The button and printing draw all plots.
"use strict";
(() => {
  const plots = [...document.querySelectorAll(".chart")];
  const near = new Set(); // plots in view or close to it
  const stale = new Set(); // plots drawn before a method was hidden or shown again
  const hidden = new Set(); // methods
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  const visible = (trace) => !hidden.has(trace.meta);

  const draw = (plot) => {
    const figure = JSON.parse(plot.nextElementSibling.textContent);
    if (touch) figure.layout.dragmode = false; // a finger scrolls the page
    for (const trace of figure.data) trace.visible = visible(trace);
    Plotly.newPlot(plot, figure.data, figure.layout, config);
    plot.dataset.drawn = "yes";
  };

  const show = (plot) => {
    if (!plot.dataset.drawn) draw(plot);
    else if (stale.has(plot)) Plotly.restyle(plot, { visible: plot.data.map(visible) });
    stale.delete(plot);
  };
  const showAll = () => plots.forEach(show);

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) show(target);
    }
  }, { rootMargin: "400px" });
  plots.forEach((plot) => observer.observe(plot));
  addEventListener("beforeprint", showAll);
  document.getElementById("draw-all").addEventListener("click", showAll);

  const chips = [...document.querySelectorAll("[data-method]")];
  const toggle = (method) => {
    if (!hidden.delete(method)) hidden.add(method);
    for (const chip of chips) chip.setAttribute("aria-pressed", !hidden.has(chip.dataset.method));
    for (const plot of plots) if (plot.dataset.drawn) stale.add(plot);
    near.forEach(show);
  };
  for (const chip of chips) chip.addEventListener("click", () => toggle(chip.dataset.method));

  // The legend must not cover the heading that a link jumps to.
  const legend = document.querySelector(".legend");
  const makeRoom = () => {
    document.documentElement.style.scrollPaddingTop = `${legend.offsetHeight + 12}px`;
  };
  addEventListener("resize", makeRoom);
  makeRoom();

  const contents = document.querySelector("nav details");
  const narrow = matchMedia("(max-width: 1099px)");
  const fold = () => { contents.open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
})();
