// The contrast of every text of the page against what lies behind it (WCAG 2.2), with its element.
(() => {
  const parse = (colour) => {
    const parts = colour.match(/[\d.]+/g).map(Number);
    return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
  };
  const over = (above, below) =>
    [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat([1]);
  const luminance = (colour) => {
    const [r, g, b] = colour
      .slice(0, 3)
      .map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const stack = [];
    for (let node = element; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      stack.push(colour);
      if (colour[3] === 1) break;
    }
    return stack.reverse().reduce((below, above) => over(above, below), [255, 255, 255, 1]);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getClientRects().length) continue;
    if (["title", "desc"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    const front = parse(drawn ? style.fill : style.color);
    const back = ground(drawn ? element.ownerSVGElement.parentElement : element);
    const a = luminance(over(front, back));
    const b = luminance(back);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, element.tagName, element.textContent.trim().slice(0, 40)]);
  }
  return found;
})();
