"use strict";
// Toggles, zoom and downloads of the figures. The page is complete and readable without this script.
for (const figure of document.querySelectorAll("figure[data-name]")) {
  const name = figure.dataset.name;
  const plot = figure.querySelector(".plot");
  const svg = plot.querySelector("svg");
  const home = svg.getAttribute("viewBox").trim().split(/\s+/).map(Number);
  let view = home.slice();

  const show = () => svg.setAttribute("viewBox", view.join(" "));
  const clamp = () => {
    view[2] = Math.min(view[2], home[2]);
    view[3] = Math.min(view[3], home[3]);
    view[0] = Math.max(home[0], Math.min(view[0], home[0] + home[2] - view[2]));
    view[1] = Math.max(home[1], Math.min(view[1], home[1] + home[3] - view[3]));
  };
  const zoom = (factor, x = 0.5, y = 0.5) => {
    const width = Math.max(view[2] * factor, home[2] / 20);
    const height = Math.max(view[3] * factor, home[3] / 20);
    view = [view[0] + (view[2] - width) * x, view[1] + (view[3] - height) * y, width, height];
    clamp();
    show();
  };
  const move = (x, y) => {
    view[0] += x * view[2];
    view[1] += y * view[3];
    clamp();
    show();
  };
  const reset = () => {
    view = home.slice();
    show();
  };

  plot.addEventListener("keydown", (event) => {
    const actions = {
      "+": () => zoom(0.8), "=": () => zoom(0.8), "-": () => zoom(1.25), "0": reset,
      ArrowLeft: () => move(-0.1, 0), ArrowRight: () => move(0.1, 0), ArrowUp: () => move(0, -0.1), ArrowDown: () => move(0, 0.1),
    };
    if (event.key in actions && !event.ctrlKey && !event.metaKey && !event.altKey) {
      actions[event.key]();
      event.preventDefault();
    }
  });
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== plot) return;
    const box = plot.getBoundingClientRect();
    zoom(event.deltaY < 0 ? 0.85 : 1 / 0.85, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    event.preventDefault();
  }, { passive: false });
  let drag = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") drag = [event.clientX, event.clientY];
  });
  plot.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const box = plot.getBoundingClientRect();
    move((drag[0] - event.clientX) / box.width, (drag[1] - event.clientY) / box.height);
    drag = [event.clientX, event.clientY];
  });
  for (const end of ["pointerup", "pointerleave"]) plot.addEventListener(end, () => { drag = null; });

  const save = (blob, ending) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${name}.${ending}`;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const picture = () => {
    const copy = svg.cloneNode(true);
    copy.setAttribute("viewBox", home.join(" "));
    copy.setAttribute("style", `color:#1a1b1c;background:#ffffff;font-family:sans-serif`);
    for (const element of copy.querySelectorAll("[hidden]")) element.remove();
    return new XMLSerializer().serializeToString(copy);
  };
  const savers = {
    svg: () => save(new Blob([picture()], { type: "image/svg+xml" }), "svg"),
    csv: () => save(new Blob([figure.querySelector("script[type='text/csv']").textContent.trim().replaceAll("<\\/", "</") + "\n"], { type: "text/csv" }), "csv"),
    png: () => {
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        const scale = 1600 / home[2];
        canvas.width = 1600;
        canvas.height = Math.round(home[3] * scale);
        const context = canvas.getContext("2d");
        context.fillStyle = "#ffffff";
        context.fillRect(0, 0, canvas.width, canvas.height);
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((blob) => save(blob, "png"), "image/png");
      };
      image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(picture());
    },
  };
  const actions = { in: () => zoom(0.7), out: () => zoom(1 / 0.7), reset, ...savers };
  for (const button of figure.querySelectorAll("button[data-action]")) {
    button.addEventListener("click", () => actions[button.dataset.action]());
  }
  for (const button of figure.querySelectorAll("button[data-series]")) {
    button.addEventListener("click", () => {
      const visible = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(visible));
      for (const element of svg.querySelectorAll(`[id^="${name}-series-${button.dataset.series}-"]`)) {
        element.toggleAttribute("hidden", !visible);
      }
    });
  }
  figure.querySelector(".tools").hidden = false;
  figure.dataset.ready = "true";
}
