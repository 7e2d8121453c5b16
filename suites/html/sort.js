// A click on a heading sorts its table: by number where the cells begin with one, missing figures last, a second click the other way.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), table = heading.closest("table"), body = table.tBodies[0];
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const figures = heading.classList.contains("figure");
    const key = (row) => {
      const text = row.cells[heading.cellIndex].textContent;
      return figures ? parseFloat(text) : text;
    };
    const compare = (a, b) => {
      if (figures && (Number.isNaN(a) || Number.isNaN(b))) return Number.isNaN(a) - Number.isNaN(b);
      const order = figures ? a - b : a.localeCompare(b, undefined, { numeric: true });
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
  });
}
