// What every chart of the page draws, whether inside of its frame, and what is said of it.
[...document.querySelectorAll("svg.chart")].map((svg) => {
  const frame = svg.viewBox.baseVal;
  const shown = svg.getBoundingClientRect();
  const outside = (element) => {
    const box = element.getBBox();
    const right = box.x + box.width > frame.width + 1;
    return box.x < -1 || box.y < -1 || right || box.y + box.height > frame.height + 1;
  };
  const cut = (element) => {
    const box = element.getBoundingClientRect();
    const beside = box.left < shown.left - 2 || box.right > shown.right + 2;
    return beside || box.top < shown.top - 2 || box.bottom > shown.bottom + 2;
  };
  const marks = [...svg.querySelectorAll(".bar, .line, .dot, .cross")];
  const shapes = [...svg.querySelectorAll("rect, line, path, circle, polyline, polygon")];
  const labels = svg.getAttribute("aria-labelledby").split(" ");
  return {
    title: svg.querySelector("title").textContent,
    said: svg.querySelector("desc").textContent,
    labelled: labels.every((id) => document.getElementById(id)),
    drawn: marks.filter((e) => e.getBBox().width + e.getBBox().height > 0).length,
    outside: shapes.filter(outside).length,
    cut: [...svg.querySelectorAll("text")].filter(cut).map((e) => e.textContent),
    tables: svg.closest("figure").querySelectorAll("details table tbody tr").length,
  };
});
