// Sorts tables by a column. Neither "less than" nor an ampersand may stand here: the page is well-formed XML.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    const text = row => row.cells[column].textContent.trim();
    const amount = row => parseFloat(text(row).replaceAll(",", ""));
    const missing = row => head.className === "number" ? isNaN(amount(row)) : text(row) === "-";
    const order = (a, b) => head.className === "number" ? amount(a) - amount(b) : text(a).localeCompare(text(b), "en", {numeric: true});
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      // A value that a run does not have comes last in both directions.
      const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : sign * order(a, b)));
      body.append(...rows);
    });
  });
}
