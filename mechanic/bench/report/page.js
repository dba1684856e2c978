// Plots are drawn when they come into view, or all of them when asked to or to be printed.
"use strict";
(() => {
  const places = [...document.querySelectorAll(".chart")];
  const near = new Set(); // places in view or close to it
  const stale = new Set(); // drawn before a method was hidden or shown again
  const hidden = new Set(); // methods
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  const visible = (trace) => !hidden.has(trace.meta);

  const draw = (place) => {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    if (touch) figure.layout.dragmode = false; // a finger scrolls the page
    for (const trace of figure.data) trace.visible = visible(trace);
    Plotly.newPlot(place, figure.data, figure.layout, config);
    place.dataset.drawn = "yes";
  };

  const show = (place) => {
    if (!place.dataset.drawn) draw(place);
    else if (stale.has(place)) Plotly.restyle(place, { visible: place.data.map(visible) });
    stale.delete(place);
  };
  const showAll = () => places.forEach(show);

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) show(target);
    }
  }, { rootMargin: "400px" });
  places.forEach((place) => observer.observe(place));
  addEventListener("beforeprint", showAll);
  document.getElementById("draw-all").addEventListener("click", showAll);

  const chips = [...document.querySelectorAll("[data-method]")];
  const toggle = (method) => {
    if (!hidden.delete(method)) hidden.add(method);
    for (const chip of chips) chip.setAttribute("aria-pressed", !hidden.has(chip.dataset.method));
    for (const place of places) if (place.dataset.drawn) stale.add(place);
    near.forEach(show);
  };
  for (const chip of chips) chip.addEventListener("click", () => toggle(chip.dataset.method));

  // A heading that is jumped to must not hide behind the legend.
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
